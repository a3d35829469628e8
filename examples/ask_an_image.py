"""Asks a question about an image, with the full model and with prefill-only pruning.

    python examples/ask_an_image.py MODEL IMAGE "question"      # MODEL: a hub name or a folder
"""

import argparse
import time
from statistics import median

from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

import popvlm

parser = argparse.ArgumentParser(description="Asks a question about an image, in full and pruned.")
parser.add_argument("model", help="a hub name or a folder")
parser.add_argument("image", help="the path of an image")
parser.add_argument("question")
asked = parser.parse_args()
try:
    image = Image.open(asked.image).convert("RGB")  # before the model, which takes longer
except OSError as error:
    parser.error(f"{asked.image} is no image that can be read ({error}); give another")

processor = AutoProcessor.from_pretrained(asked.model)
model = AutoModelForImageTextToText.from_pretrained(asked.model, dtype="auto", device_map="auto")
popvlm.accelerate(processor, model)

content = [{"type": "image"}, {"type": "text", "text": asked.question}]
text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
inputs = processor(text=[text], images=[image], return_tensors="pt").to(model.device)
length = inputs["input_ids"].shape[1]


def first_token() -> float:
    start = time.perf_counter()
    model.generate(**inputs, max_new_tokens=1, do_sample=False).tolist()  # which waits for the device
    return time.perf_counter() - start


def answer() -> str:
    tokens = model.generate(**inputs, max_new_tokens=32, do_sample=False)[0, length:]
    return processor.tokenizer.decode(tokens, skip_special_tokens=True)


full, pruned = [], []
for _ in range(6):  # in turn, so that both meet the same machine; the first of each warms up
    with popvlm.full_prefill(model):
        full.append(first_token())
    pruned.append(first_token())
with popvlm.full_prefill(model):
    print(f"full:   first token in {median(full[1:]):.3f} s   {answer()!r}")
print(f"pruned: first token in {median(pruned[1:]):.3f} s   {answer()!r}")
print(f"{median(full[1:]) / median(pruned[1:]):.2f} times as fast (medians of {len(full) - 1} runs each, in turn, the "
      f"vision encoder included); {length} prompt tokens; {popvlm.plan_of(model)}")
