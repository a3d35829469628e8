"""The published shapes: as many parameters as the published weights have."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from popvlm import shapes

PARAMETERS = {  # of the safetensors on the hub
    "qwen3-vl-2b": 2_127_532_032,
    "qwen3-vl-4b": 4_437_815_808,
    "qwen3-vl-8b": 8_767_123_696,
    "qwen3-vl-30b-a3b": 31_070_754_032,
    "gemma-3-4b": 4_300_079_472,
    "gemma-3-12b": 12_187_325_040,
    "gemma-3-27b": 27_432_406_640,
    "llama-3.1-8b": 8_030_261_248,
}


@pytest.mark.parametrize("name", shapes.NAMES)
def test_has_as_many_parameters_as_published(name: str) -> None:
    settings = shapes.config(name)
    kind = AutoModelForImageTextToText if hasattr(settings, "vision_config") else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(settings)
    assert sum(weight.numel() for weight in model.parameters()) == PARAMETERS[name]


def test_can_be_cut_to_its_first_layers() -> None:
    whole, cut = (shapes.config("gemma-3-4b", layers) for layers in (None, 7))
    assert whole.text_config.num_hidden_layers == 34
    assert cut.text_config.num_hidden_layers == 7
    assert cut.text_config.layer_types == whole.text_config.layer_types[:7]
    assert cut.vision_config.to_dict() == whole.vision_config.to_dict()


def test_a_change_to_one_config_reaches_no_other() -> None:
    text = shapes.config("qwen3-vl-2b").text_config
    rope = text.rope_scaling if text.rope_scaling else text.rope_parameters
    rope["mrope_section"][0] = 0
    again = shapes.config("qwen3-vl-2b").text_config
    assert (again.rope_scaling or again.rope_parameters)["mrope_section"] == [24, 20, 20]


def test_refuses_in_a_sentence() -> None:
    with pytest.raises(ValueError, match="no shape 'qwen3-vl-7b'; give one of qwen3-vl-2b, "):
        shapes.config("qwen3-vl-7b")
    for layers in 0, 29:
        with pytest.raises(ValueError, match="qwen3-vl-2b has 28; give 1 to 28"):
            shapes.config("qwen3-vl-2b", layers)
