"""A small Qwen3-VL with random weights and a real processor, in a folder that AutoProcessor and AutoModel load."""

from importlib.resources import files
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
           "<|video_pad|>"]
TEMPLATE = (files("popvlm") / "embedded" / "tiny-qwen3-vl" / "chat_template.jinja").read_text()


def processor() -> Qwen3VLProcessor:
    """A byte-level tokenizer (a token a byte) with Qwen's special tokens, and Qwen3-VL's own image processing."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({byte: index for index, byte in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(SPECIAL)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>",
                                        padding_side="left")
    patches = dict(patch_size=16, temporal_patch_size=2, merge_size=2)
    return Qwen3VLProcessor(Qwen2VLImageProcessor(**patches), tokenizer, Qwen3VLVideoProcessor(**patches),
                            chat_template=TEMPLATE)


def model(ids: dict[str, int], layers: int = 12) -> Qwen3VLForConditionalGeneration:
    """Qwen3-VL's architecture, with DeepStack and multimodal rotary, at a width of 256."""
    text = dict(vocab_size=len(ids), hidden_size=256, intermediate_size=768, num_hidden_layers=layers,
                num_attention_heads=8, num_key_value_heads=2, head_dim=32, pad_token_id=ids["<|endoftext|>"],
                eos_token_id=ids["<|im_end|>"],
                rope_scaling={"rope_type": "default", "mrope_section": [8, 4, 4], "mrope_interleaved": True})
    vision = dict(depth=6, hidden_size=128, intermediate_size=256, num_heads=4, patch_size=16, out_hidden_size=256,
                  num_position_embeddings=256, deepstack_visual_indexes=[1, 3])
    marks = {f"{name}_token_id": ids[f"<|{token}|>"] for name, token in [
        ("image", "image_pad"), ("video", "video_pad"), ("vision_start", "vision_start"), ("vision_end", "vision_end")]}
    torch.manual_seed(0)
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **marks)).eval()


def write(folder: Path) -> None:
    ours = processor()
    ours.save_pretrained(folder)
    model(ours.tokenizer.get_vocab()).save_pretrained(folder)

