"""Asks a model about an image, pruned and in full.

    python examples/ask_an_image.py MODEL IMAGE "question"      # MODEL: a hub name or a folder
"""

import sys

from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

import popvlm

name, path, question = sys.argv[1:]
image = Image.open(path).convert("RGB")

processor = AutoProcessor.from_pretrained(name)
model = AutoModelForImageTextToText.from_pretrained(name, dtype="auto", device_map="auto")
model = popvlm.accelerate(processor, model)

content = [{"type": "image", "image": image}, {"type": "text", "text": question}]
inputs = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True,
                                       tokenize=True, return_dict=True, return_tensors="pt").to(model.device)


def answer() -> str:
    tokens = model.generate(**inputs, max_new_tokens=64, do_sample=False)
    return processor.decode(tokens[0, inputs["input_ids"].shape[1]:], skip_special_tokens=True)


print("pruned:", answer())
with popvlm.full_prefill(model):
    print("full:  ", answer())
