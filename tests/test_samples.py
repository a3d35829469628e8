"""Samples through real processors: every form gives what the processor gives for the prompt written out by hand."""

from __future__ import annotations

import base64
import io
import math

import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as token_models
from transformers import Gemma3ForConditionalGeneration, Gemma3ImageProcessor, Gemma3Processor, PreTrainedTokenizerFast

import random_qwen3_vl
from models import config
from popvlm.fitting import fit
from popvlm.mix import KINDS, kind_of
from popvlm.plan import PruningPlan
from popvlm.samples import BuiltinMix, Prepared, SampleError, Tally, UnreadableImage, describe, prepare

SPECIAL = {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"}
TEMPLATE = (
    "{% for message in messages %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('must alternate') }}{% endif %}"
    "<{{ message.role }}>{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{{ '<start_of_image>' if part.type == 'image' else part.text }}{% endfor %}"
    "{% endif %}</>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}")


def tokenizer(template=TEMPLATE, special=SPECIAL):
    """A token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(token_models.BPE({byte: index for index, byte in enumerate(["<pad>", *alphabet])}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", extra_special_tokens=special)
    made.chat_template = template
    return made


@pytest.fixture(scope="module")
def processor():
    images = Gemma3ImageProcessor(size={"height": 16, "width": 16}, image_mean=[0, 0, 0], image_std=[1, 1, 1])
    return Gemma3Processor(images, tokenizer(), chat_template=TEMPLATE, image_seq_length=4)


@pytest.fixture(scope="module")
def qwen():
    pytest.importorskip("torchvision")
    pytest.importorskip("transformers", minversion="5.0")
    return random_qwen3_vl.processor()


def colour(name):
    return Image.new("RGB", (40, 30), name)


def png(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def turn(text, *images, role="user"):
    return {"role": role, "content": [*({"type": "image", "image": image} for image in images),
                                      {"type": "text", "text": text}]}


def same(one, other):
    assert set(one) == set(other)
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def test_a_question_about_an_image_is_the_template_around_it(processor):
    got = prepare(processor, {"image": colour("red"), "question": "What colour?"})
    written = "<user>\n\n<start_of_image>" + 4 * "<image_soft_token>" + "<end_of_image>\n\nWhat colour?</><assistant>"
    ids = processor.tokenizer(written, add_special_tokens=False)["input_ids"]
    assert got["input_ids"].tolist() == [ids]
    assert got["token_type_ids"].tolist() == [[int(each == processor.tokenizer.image_token_id) for each in ids]]
    assert got["attention_mask"].all()
    assert got["pixel_values"].shape == (1, 3, 16, 16)
    assert got["pixel_values"].mean((0, 2, 3)).tolist() == [1, 0, 0]


def test_all_forms_of_a_sample_are_the_same_prompt(processor, tmp_path):
    image = colour("teal")
    image.save(tmp_path / "one.png")
    path = tmp_path / "one.png"
    placed = [{"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "What?"}]}]
    want = prepare(processor, [turn("What?", image)])
    for form in (
        {"image": image, "question": "What?"}, {"images": [path], "question": "What?", "answer": "teal"},
        {"image": str(path), "question": "What?"}, {"image": {"bytes": png(image), "path": None}, "question": "What?"},
        {"image": {"bytes": None, "path": str(path)}, "question": "What?"},
        {"image": base64.b64encode(png(image)).decode(), "question": "What?"},
        {"messages": placed, "images": [image]}, {"messages": [turn("What?")], "images": [image]},
        {"messages": [turn("What?", image), turn("Teal.", role="assistant")], "images": None},
        [{"role": "user", "content": [{"type": "image", "path": str(path)}, {"type": "text", "text": "What?"}]}],
        ({"role": "user", "content": [{"type": "image", "url": str(path)}, {"type": "text", "text": "What?"}]},),
    ):
        same(prepare(processor, form), want)


def test_a_sample_is_left_as_it_was(processor):
    messages = [turn("What?", "no file", role="user"), {"role": "assistant", "content": "Nothing."}]
    messages[0]["content"][0]["image"] = image = colour("red")
    prepare(processor, {"messages": messages, "images": [colour("blue")]})
    assert [part["type"] for part in messages[0]["content"]] == ["image", "text"]
    assert messages[0]["content"][0]["image"] is image
    assert len(messages) == 2


def test_images_stay_in_order_over_turns(processor):
    got = prepare(processor, [turn("One?", colour("red"), colour("lime")), turn("Yes.", role="assistant"),
                              turn("And this?", colour("blue"))])
    assert got["pixel_values"].mean((2, 3)).tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    text = processor.tokenizer.decode(got["input_ids"][0])
    assert text.index("One?") < text.index("Yes.") < text.index("And this?") < text.rindex("<assistant>")


def test_text_is_a_chat_for_a_chat_model_and_itself_for_a_base_model(processor):
    chat, base = tokenizer(), tokenizer(template=None)
    want = chat("<user>Hi there</><assistant>", add_special_tokens=False)["input_ids"]
    for form in "Hi there", {"question": "Hi there"}, [{"role": "user", "content": "Hi there"}], [turn("Hi there")]:
        for each in processor, chat:
            assert prepare(each, form)["input_ids"].tolist() == [want]
        assert prepare(base, form)["input_ids"].tolist() == [base("Hi there")["input_ids"]]
    assert "pixel_values" not in prepare(processor, "Hi there")


def test_qwens_own_processor(qwen):
    images = [Image.new("RGB", size) for size in ((64, 96), (320, 64))]
    got = prepare(qwen, {"question": "Which?", "images": images})
    grids = got["image_grid_thw"]
    assert grids.tolist() == [[1, 6, 4], [1, 4, 20]]
    assert (got["input_ids"] == qwen.image_token_id).sum() == 6 * 4 // 4 + 4 * 20 // 4
    assert got["pixel_values"].shape[0] == grids.prod(-1).sum()
    prepared = Prepared(qwen, [{"question": "Which?", "image": colour("red").resize((64, 96))}])
    assert describe(prepared)["all"].visual == 6
    # An image that is read and that the processor refuses: 300 times as wide as high.
    with pytest.raises(UnreadableImage, match=r"refuses it .*aspect ratio"):
        prepare(qwen, {"question": "What?", "image": Image.new("RGB", (6000, 20))})


def test_unreadable_images_are_passed_over_and_counted(processor, tmp_path):
    (tmp_path / "text.png").write_text("no image")
    (tmp_path / "cut.png").write_bytes(png(Image.effect_noise((64, 64), 90))[:600])
    samples = [{"kind": "good", "question": "0", "image": colour("red")},
               {"kind": "bad", "question": "1", "image": str(tmp_path / "text.png")},
               {"kind": "bad", "question": "2", "image": str(tmp_path / "none.png")},
               {"kind": "good", "question": "3", "image": tmp_path / "cut.png"},
               "4",
               {"kind": "bad", "question": "5", "image": {"bytes": b"GIF89a", "path": "x.gif"}},
               [turn("6", colour("blue"), str(tmp_path / "none.png"))],
               {"kind": "good", "question": "7", "images": [colour("red"), colour("blue")]}]
    prepared = Prepared(processor, samples)
    assert len(prepared) == 3
    assert prepared.indices == [0, 4, 7]
    assert sorted(prepared.skipped) == [1, 2, 3, 5, 6]
    assert all(f"sample {index}: an image cannot be read" in why for index, why in prepared.skipped.items())
    for got, index in zip(prepared, prepared.indices):
        same(got, prepare(processor, samples[index]))
    same(prepared[-1], prepare(processor, samples[7]))
    text = [len(f"<user>{index}</><assistant>") for index in range(8)]
    image = 2 * 2 + 2  # its marks, and the line feeds around it
    assert describe(prepared) == {
        "bad": Tally(skipped=3), "good": Tally(2, 4 + 8, 2 * text[0] + 3 * image, 1),
        "samples": Tally(1, 0, text[4], 1), "all": Tally(3, 12, 3 * text[0] + 3 * image, 5)}
    assert describe(prepared)["good"].visual_share == 12 / (12 + 2 * text[0] + 3 * image)


@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_samples_are_kept_where_there_is_room(processor, monkeypatch, kept):
    monkeypatch.setattr("popvlm.samples.KEPT", kept)

    class Counted(list):
        asked = 0

        def __getitem__(self, index):
            self.asked += 1
            return super().__getitem__(index)

    samples = Counted(["one", "two", "three"])
    prepared = Prepared(processor, samples)
    assert samples.asked == 3
    describe(prepared)
    assert samples.asked == 3  # counted while they were tried
    first = prepared[1]
    first.pop("attention_mask")
    assert "attention_mask" in prepared[1], "each has its own"
    assert samples.asked == (3 if kept else 5)


@pytest.mark.parametrize(("samples", "error"), [
    ([], "no samples"),
    ("one prompt", "samples is a str.*give a list"),
    ({"train": []}, "samples is a dict.*one split"),
    ((text for text in "ab"), "samples is a generator.*give a list"),
    ([{"query": "What?", "picture": 0}], "sample 0: it has neither messages nor a question .it has query, picture"),
    (["Hi", 3], "sample 1: it is no sample .int"),
    ([[{"role": "user"}]], "sample 0: it is no sample"),
    ([[{"content": "Hi"}]], "sample 0: it is no sample"),
    ([[turn("Yes.", role="assistant")]], "sample 0: it is no sample"),
    ([[turn("A", role="user"), turn("B", role="user")]], "sample 0: the chat template refuses it .*must alternate"),
    ([[{"role": "user", "content": [{"type": "image"}]}]], "sample 0: its messages have a place for an image"),
    ([{"question": "What?", "image": "none.png"}], "of 1 samples none can be read; sample 0: an image cannot be read"),
])
def test_what_cannot_be_used_is_refused_in_a_sentence(processor, samples, error):
    with pytest.raises(SampleError, match=error) as caught:
        Prepared(processor, samples)
    assert "\n" not in str(caught.value)


def test_a_text_only_model_refuses_images():
    with pytest.raises(SampleError, match=r"sample 1: it has an image, and .* takes none"):
        Prepared(tokenizer(), ["Hi", {"question": "What?", "image": colour("red")}])
    with pytest.raises(SampleError, match="its prompt is empty"):
        prepare(tokenizer(template=None), "")


def test_the_mix_is_drawn_when_it_is_asked_for(processor, monkeypatch):
    drawn = []
    monkeypatch.setattr("popvlm.samples.builtin", lambda index, *_: drawn.append(index) or [turn(str(index))])
    mix = BuiltinMix(1000, seed=4)
    prepared = Prepared(processor, mix)
    assert len(prepared) == len(mix) == 1000
    assert drawn == []
    same(prepared[7], prepare(processor, "7"))
    assert drawn == [7]
    with pytest.raises(IndexError):
        mix[1000]


def test_the_mix_through_the_processor(processor):
    prepared = Prepared(processor, BuiltinMix(20, seed=4, largest=128))
    told = describe(prepared)
    assert {kind: tally.prompts for kind, tally in told.items()} == dict(sorted(KINDS.items())) | {"all": 20}
    assert list(told)[-1] == "all"
    for kind, tally in told.items():
        assert tally.skipped == 0
        count = 0 if kind in ("text", "code") else 1
        if kind not in ("several images", "all"):
            assert tally.visual == 4 * count * tally.prompts
    assert 2 * 4 * 2 <= told["several images"].visual <= 2 * 4 * 4
    for name in "prompts", "visual", "text":
        assert getattr(told["all"], name) == sum(getattr(told[kind], name) for kind in KINDS)


def test_a_text_only_model_gets_the_mix_without_images():
    prepared = Prepared(tokenizer(), BuiltinMix(30, seed=4))
    told = describe(prepared)
    assert {kind: tally.prompts for kind, tally in told.items()} == {"code": 10, "text": 20, "all": 30}
    assert told["all"].visual == 0
    assert len(prepared) == 30


def test_a_mix_that_cannot_be():
    for wrong in {"count": 0}, {"count": 5, "kinds": ()}, {"count": 5, "kinds": ("table", "poem")}:
        with pytest.raises(SampleError, match="give"):
            BuiltinMix(**wrong)
    assert BuiltinMix(3, kinds=("code",))[2]["kind"] == kind_of(2, kinds=("code",)) == "code"


def test_a_model_and_a_fit_take_what_is_prepared(processor):
    settings = config("gemma3")
    settings.text_config.vocab_size = len(processor.tokenizer)
    settings.image_token_id = settings.image_token_index = processor.tokenizer.image_token_id
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(settings).eval()
    questions = [{"question": f"What is number {index}?", "image": colour(name)}
                 for index, name in enumerate(("red", "lime", "blue", "gold", "teal", "pink"))]
    prepared = Prepared(processor, [*questions, "And now a longer text without any image."])
    for inputs in prepared:
        logits = model(**inputs, logits_to_keep=1).logits
        assert logits.shape == (1, 1, settings.text_config.vocab_size)
        assert logits.isfinite().all()
    plan, report = fit(model, PruningPlan(6, visual={3, 4, 5}, text={5}), prepared)
    assert plan.kv == "fitted"
    # The context of every prompt: all its tokens but the last.
    told = describe(prepared)["all"]
    seen = {(line.kind, line.layer): line.positions for line in report}
    assert seen["visual", 5] == told.visual == 24
    assert seen["text", 5] == told.text - 7
    assert all(math.isfinite(line.fitted_keys) for line in report)


def test_a_dataset_that_decodes_images(processor):
    datasets = pytest.importorskip("datasets", exc_type=ImportError)
    rows = {"image": [{"bytes": png(colour(name)), "path": None} for name in ("red", "lime", "blue")],
            "question": ["0", "1", "2"]}
    rows["image"][1]["bytes"] = rows["image"][1]["bytes"][:50]
    features = datasets.Features({"image": datasets.Image(), "question": datasets.Value("string")})
    prepared = Prepared(processor, datasets.Dataset.from_dict(rows, features))
    assert prepared.indices == [0, 2]
    assert list(prepared.skipped) == [1]
    same(prepared[1], prepare(processor, {"image": colour("blue"), "question": "2"}))
