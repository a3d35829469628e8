"""Asks a question about an image, with the full model and with prefill-only pruning.

    python examples/ask_an_image.py MODEL IMAGE "question"      # MODEL: a hub name or a folder
"""

import sys
import time
from statistics import median

from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

import popvlm

name, path, question = sys.argv[1:]
processor = AutoProcessor.from_pretrained(name)
model = AutoModelForImageTextToText.from_pretrained(name, device_map="auto")
popvlm.accelerate(processor, model)

content = [{"type": "image"}, {"type": "text", "text": question}]
text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
inputs = processor(text=[text], images=[Image.open(path).convert("RGB")], return_tensors="pt").to(model.device)
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
ratio = median(a / b for a, b in zip(full[1:], pruned[1:]))
print(f"{ratio:.2f} times as fast, vision encoder included; {length} prompt tokens; {popvlm.plan_of(model)}")
