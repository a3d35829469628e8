"""The commands, on small random models in folders with real processors; errors are one sentence with exit code 2."""

from __future__ import annotations

import functools
import http.server
import importlib
import io
import json
import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, PreTrainedTokenizerFast
from typer.testing import CliRunner

import popvlm
from models import IMAGE, LAYERS, VIDEO, VISION_END, VISION_START, build, oracle
from popvlm import PruningPlan
from popvlm.plan import Fingerprint

ROOT = Path(__file__).parents[1]
QUESTION = "w5 w6 w7 w8 w9"


class EmbeddedModelError(Exception):
    __module__ = "popvlm.embedded"


@pytest.fixture(autouse=True)
def embedded(monkeypatch, gemma, picture):
    """In place of the models that ship with popvlm, which take training."""
    module = types.ModuleType("popvlm.embedded")
    module.NAMES = ("tiny-qwen3-vl", "unlucky")

    def folder(name, say):
        if name == "unlucky":
            raise EmbeddedModelError("unlucky is not in this installation; install popvlm[gemma]")
        return gemma

    module.folder = folder
    module.demo_questions = lambda: [(picture, QUESTION), (picture, "w20 w21 [bold]")]
    monkeypatch.setitem(sys.modules, "popvlm.embedded", module)
    monkeypatch.setattr(popvlm, "embedded", module, raising=False)
    if "popvlm.answer" in sys.modules:
        monkeypatch.setattr(sys.modules["popvlm.answer"], "embedded", module)
    return module


@pytest.fixture
def answer(embedded):
    return importlib.import_module("popvlm.answer")


def run(*arguments, given=None):
    from popvlm.cli import app

    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=given)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def told(*arguments, given=None):
    """Standard output of a command that succeeds and has nothing to complain about."""
    result = run(*arguments, given=given)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert "\x1b" not in result.stdout
    return result.stdout


def refused(*arguments, given=None):
    """The one sentence of a command that fails."""
    result = run(*arguments, given=given)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("popvlm: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def tokenizer(marks):
    """A word a token, `w5` token 5, so that any answer streams word by word."""
    names = {0: "<pad>", 1: "<bos>", 2: "<unk>"} | marks
    vocabulary = {names.get(index, f"w{index}"): index for index in range(300)}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.add_special_tokens(list(names.values()))
    named = {f"{name}_token": marks[mark] for name, mark in [("boi", VISION_START), ("eoi", VISION_END),
                                                             ("image", IMAGE)] if mark in marks}
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", unk_token="<unk>",
                                   padding_side="left", model_input_names=["input_ids", "attention_mask"],
                                   extra_special_tokens=named)


def template(image):
    return ("{{ bos_token }} {% for message in messages %}w10 {% if message.content is string %}{{ message.content }}"
            "{% else %}{% for part in message.content %}{% if part.type == 'image' %}" + image +
            "{% else %}{{ part.text }}{% endif %} {% endfor %}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %} w11{% endif %}")


def processor(family):
    if family == "gemma3":
        from transformers import Gemma3ImageProcessor, Gemma3Processor

        marks = {IMAGE: "<image_soft_token>", VISION_START: "<start_of_image>", VISION_END: "<end_of_image>"}
        return Gemma3Processor(Gemma3ImageProcessor(size={"height": 16, "width": 16}), tokenizer(marks),
                               template("<start_of_image>"), image_seq_length=4)
    if family == "qwen3_vl":
        pytest.importorskip("torchvision")
        pytest.importorskip("transformers", minversion="5.0")  # before, its tokenizer had to be of Qwen2's class
        from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

        marks = {IMAGE: "<|image_pad|>", VIDEO: "<|video_pad|>", VISION_START: "<|vision_start|>",
                 VISION_END: "<|vision_end|>"}
        patches = dict(patch_size=4, temporal_patch_size=2, merge_size=2)
        images = Qwen2VLImageProcessor(**patches, size={"shortest_edge": 256, "longest_edge": 1024})
        return Qwen3VLProcessor(images, tokenizer(marks), Qwen3VLVideoProcessor(**patches),
                                chat_template=template("<|vision_start|> <|image_pad|> <|vision_end|>"))
    words = tokenizer({})
    words.chat_template = template("")
    return words


@pytest.fixture(scope="session")
def write(tmp_path_factory):
    @functools.cache
    def written(family):
        ours = processor(family)
        path = tmp_path_factory.mktemp(family)
        ours.save_pretrained(path)
        build(family).save_pretrained(path)
        return path
    return written


@pytest.fixture(scope="session")
def gemma(write):
    return write("gemma3")


@pytest.fixture(scope="session")
def picture(tmp_path_factory):
    path = tmp_path_factory.mktemp("images") / "picture.png"
    torch.manual_seed(1)
    Image.fromarray(torch.randint(0, 256, (20, 24, 3), dtype=torch.uint8).numpy()).save(path)
    return path


@functools.cache
def expected(folder, paths, skipped, tokens):
    """What the model in a folder answers by the oracle, its prompt put together by hand."""
    auto = AutoModelForImageTextToText if (folder / "processor_config.json").exists() or paths else AutoModelForCausalLM
    ours, model = AutoProcessor.from_pretrained(folder), auto.from_pretrained(folder)
    if hasattr(ours, "tokenizer"):
        mark = "<start_of_image>" if "Gemma" in type(ours).__name__ else "<|vision_start|> <|image_pad|> <|vision_end|>"
        text = " ".join(["<bos> w10", *[mark] * len(paths), QUESTION, "w11"])
        images = [[Image.open(path).convert("RGB") for path in paths]] if paths else None
        inputs = ours(text=[text], images=images, return_tensors="pt", add_special_tokens=False)
    else:
        inputs = ours(f"<bos> w10 {QUESTION} w11", return_tensors="pt", add_special_tokens=False)
    with oracle(model, set(skipped), set(skipped)):
        made = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    length = inputs["input_ids"].shape[1]
    return length, " ".join(f"w{token}" for token in made[0, length:].tolist())


# ---- ask


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"])
@pytest.mark.parametrize("images", [1, 2, 0])
def test_ask_prunes_the_last_third(write, picture, family, images):
    got = json.loads(told("ask", *[picture] * images, QUESTION, "-m", write(family), "--max-new-tokens", 6, "--json"))
    length, text = expected(write(family), (picture,) * images, (4, 5), 6)
    assert (got["text"], got["prompt_tokens"], got["tokens"]) == (text, length, 6)
    assert got["plan"]["visual"] == got["plan"]["text"] == [4, 5]
    assert got["first_token_s"] > 0
    assert got["tokens_per_s"] > 0


def test_ask_a_text_only_model(write):
    got = json.loads(told("ask", QUESTION, "-m", write("llama"), "--ratio", 0.5, "--max-new-tokens", 6, "--json"))
    assert (got["prompt_tokens"], got["text"]) == expected(write("llama"), (), (3, 4, 5), 6)


def test_ask_a_base_model(write, tmp_path):
    """Without a chat template it goes on from the question."""
    words = tokenizer({})
    words.save_pretrained(tmp_path)
    model = build("llama")
    model.save_pretrained(tmp_path)
    got = json.loads(told("ask", QUESTION, "-m", tmp_path, "--full", "--max-new-tokens", 4, "--json"))
    made = model.generate(words(QUESTION, return_tensors="pt").input_ids, max_new_tokens=4, do_sample=False)
    assert got["text"].split() == [f"w{token}" for token in made[0, got["prompt_tokens"]:].tolist()]


@pytest.mark.parametrize(("choice", "skipped"), [
    (["--full"], ()), (["--plan", "lossless"], (5,)), (["--plan", "last-third"], (4, 5)),
    (["--ratio", "0.5"], (3, 4, 5)),
    (["--dtype", "float32", "--device", "cpu", "--attention", "eager"], (4, 5))])
def test_ask_prints_the_answer_its_times_and_the_plan(gemma, picture, choice, skipped):
    said = told("ask", picture, QUESTION, "-m", gemma, "--max-new-tokens", 6, *choice).splitlines()
    length, text = expected(gemma, (picture,), skipped, 6)
    assert said[0] == text
    assert said[2].startswith("first token in ")
    assert said[2].endswith(f"tokens/s ({length} tokens read, 6 written)")
    last = repr(PruningPlan.from_layers(LAYERS, skipped))
    assert said[3] == (f"plan: {last[len('PruningPlan('):-1]}" if skipped else "the full model, no plan")
    assert len(said) == 4


def test_ask_with_a_plan_file(gemma, picture, tmp_path):
    PruningPlan.from_layers(LAYERS, {1, 5}).save(tmp_path / "plan.json")
    got = json.loads(told("ask", picture, QUESTION, "-m", gemma, "--plan", tmp_path / "plan.json",
                          "--max-new-tokens", 6, "--json"))
    assert got["text"] == expected(gemma, (picture,), (1, 5), 6)[1]


def test_one_token_has_no_rate(gemma, picture):
    assert json.loads(told("ask", picture, QUESTION, "-m", gemma, "--max-new-tokens", 1, "--json")
                      )["tokens_per_s"] is None
    assert "then no more (" in told("ask", picture, QUESTION, "-m", gemma, "--max-new-tokens", 1)


def test_the_answer_streams(gemma, answer):
    """Words are handed on while the model still runs, and together are the answer."""
    ours, model = answer.load(answer.find(str(gemma)))
    events = []
    model.register_forward_pre_hook(lambda module, args: events.append(None))
    got = answer.answer(ours, model, [], QUESTION, max_new_tokens=6, write=events.append)
    assert "".join(event for event in events if event).strip() == got.text
    words = [index for index, event in enumerate(events) if event]
    assert len(words) > 3
    assert None in events[words[0]:]


def test_times(gemma, answer, monkeypatch):
    """From the decoded images to the first token; then the tokens after it by the time after it."""
    ours, model = answer.load(answer.find(str(gemma)))
    clock = iter([10.0, 12.0, 12.5, 13.0, 13.5])
    monkeypatch.setattr(answer, "time", types.SimpleNamespace(perf_counter=clock.__next__))
    got = answer.answer(ours, model, [], QUESTION, max_new_tokens=4)
    assert (got.first_token_s, got.tokens_per_s) == (2.0, 2.0)


def test_control_characters_do_not_reach_the_terminal(gemma, monkeypatch, answer):
    def answered(*args, write, **kwargs):
        write("red \x1b[31malert\n")
        return answer.Answer("", 1, 1, 1.0, None)

    monkeypatch.setattr(answer, "answer", answered)
    assert told("ask", QUESTION, "-m", gemma).startswith("red \ufffd[31malert\n")


def test_a_terminal_that_is_not_utf8():
    code = ("import sys; import popvlm.cli as cli; "
            "cli.read_image = lambda source: sys.exit(print('\u65e5\u672c')); cli.app(['ask', 'a', 'b', '-m', 'c'])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stdout) == (0, "??\n"), done.stderr


def test_compare(gemma, picture):
    got = json.loads(told("ask", picture, QUESTION, "-m", gemma, "--max-new-tokens", 6, "--ratio", 0.5, "--compare",
                          "--json"))
    assert got["full"]["text"] == expected(gemma, (picture,), (), 6)[1]
    assert got["pruned"]["text"] == expected(gemma, (picture,), (3, 4, 5), 6)[1]
    assert got["first_token_ratio"] == got["full"]["first_token_s"] / got["pruned"]["first_token_s"]


def test_compare_lossless_answers_the_same(gemma, picture):
    said = told("ask", picture, QUESTION, "-m", gemma, "--max-new-tokens", 4, "--plan", "lossless", "--compare")
    rows = [line.split("│")[1:-1] for line in said.splitlines() if line.startswith("│")]
    assert [row[0].strip() for row in rows] == ["full", "pruned"]
    assert {row[1].strip() for row in rows} == {expected(gemma, (picture,), (), 4)[1]}
    assert "the same answer" in said


def test_compare_takes_medians_of_runs_in_turn(answer, monkeypatch):
    times = iter([9.0, 8.0, 0.3, 0.1, 0.9, 0.2, 0.5, 0.7])
    turns = []

    def answered(processor, model, images, question, *, max_new_tokens):
        turns.append((model.full, max_new_tokens))
        return answer.Answer(f"{max_new_tokens}", 1, 1, next(times), None)

    class Full:
        full = False

        def __enter__(self):
            self.full = True

        def __exit__(self, *args):
            self.full = False

    monkeypatch.setattr(answer, "answer", answered)
    monkeypatch.setattr(answer, "full_prefill", lambda model: model)
    full, pruned = answer.compare(None, Full(), [], "", max_new_tokens=40)
    assert turns == [(full, tokens) for tokens in (2, 40, 1, 1) for full in (True, False)]
    assert (full.text, pruned.text) == ("40", "40")
    assert (full.first_token_s, pruned.first_token_s) == (0.5, 0.2)


def test_popvlm_says_what_it_could_not_prune(gemma, picture, monkeypatch):
    """Its own warnings are told, in a line; others are not."""
    import warnings

    find = importlib.import_module("popvlm.answer").find

    def found(name, say):
        warnings.warn("popvlm: this ran in full", stacklevel=1)
        warnings.warn("a library's noise", stacklevel=1)
        return find(name, say)

    monkeypatch.setattr("popvlm.answer.find", found)
    result = run("ask", QUESTION, "-m", gemma, "--max-new-tokens", 1)
    assert result.stderr == "popvlm: this ran in full\n"


# ---- images


def as_bytes(image, kind="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


@pytest.fixture
def server(picture):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path != "/missing.png" else 404)
            self.end_headers()
            self.wfile.write(picture.read_bytes() if self.path == "/picture.png" else b"<html>no image</html>")

        def log_message(self, *args):
            pass

    serving = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{serving.server_port}"
    serving.shutdown()
    serving.server_close()


def test_an_image_from_standard_input_and_from_a_url(gemma, picture, server):
    want = expected(gemma, (picture,), (4, 5), 6)[1]
    options = ["-m", gemma, "--max-new-tokens", 6, "--json"]
    assert json.loads(told("ask", "-", QUESTION, *options, given=picture.read_bytes()))["text"] == want
    assert json.loads(told("ask", f"{server}/picture.png", QUESTION, *options))["text"] == want


def pixel(data, tmp_path, at=(0, 0)):
    from popvlm.cli import read_image

    (tmp_path / "image").write_bytes(data)
    image = read_image(str(tmp_path / "image"))
    assert image.mode == "RGB"
    return image.getpixel(at)


def test_transparency_is_on_white(tmp_path):
    assert pixel(as_bytes(Image.new("RGBA", (4, 4), (0, 0, 0, 0))), tmp_path) == (255, 255, 255)
    assert pixel(as_bytes(Image.new("RGBA", (4, 4), (255, 0, 0, 255))), tmp_path) == (255, 0, 0)
    assert pixel(as_bytes(Image.new("LA", (4, 4), (0, 0))), tmp_path) == (255, 255, 255)
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 0, 0, 255])
    assert pixel(as_bytes(palette), tmp_path) == (0, 0, 255)
    assert pixel(as_bytes(palette, transparency=1), tmp_path) == (255, 255, 255)


@pytest.mark.parametrize(("mode", "kind", "value", "want"), [
    ("1", "PNG", 1, 255), ("L", "PNG", 80, 80), ("I;16", "PNG", 200 * 257, 200), ("I;16", "TIFF", 3 * 257, 3),
    ("I", "TIFF", 65535, 255), ("I", "TIFF", 90, 90), ("F", "TIFF", 0.2, 51), ("F", "TIFF", 130.0, 130)])
def test_depths_are_scaled_not_clipped(tmp_path, mode, kind, value, want):
    assert pixel(as_bytes(Image.new(mode, (4, 4), value), kind), tmp_path) == pytest.approx((want,) * 3, abs=1)


def test_other_modes(tmp_path):
    assert pixel(as_bytes(Image.new("CMYK", (8, 8), (255, 0, 0, 0)), "TIFF"), tmp_path) == (0, 255, 255)
    assert pixel(as_bytes(Image.new("YCbCr", (8, 8), (255, 128, 128)), "TIFF"), tmp_path) == (255, 255, 255)
    red, blue = Image.new("RGB", (8, 8), "red"), Image.new("RGB", (8, 8), "blue")
    assert pixel(as_bytes(red, "GIF", save_all=True, append_images=[blue]), tmp_path) == (255, 0, 0)


def test_exif_orientation(tmp_path):
    image = Image.new("RGB", (6, 3), "black")
    image.putpixel((0, 0), (255, 255, 255))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: what is left on the sensor is up
    assert pixel(as_bytes(image, exif=exif), tmp_path, at=(2, 0)) == (255, 255, 255)


# ---- what goes wrong


def test_images_that_cannot_be_read(picture, tmp_path, server):
    """Each before the model, which is not there either."""
    whole = picture.read_bytes()
    bad = {"damaged": whole[:len(whole) // 2], "empty": b"", "text": b"this is no image\n",
           "half": as_bytes(Image.radial_gradient("L"), "JPEG")[:2000]}
    for name, data in bad.items():
        (tmp_path / f"{name}.png").write_bytes(data)

    def ask(source, **given):
        return refused("ask", picture, source, QUESTION, "-m", tmp_path / "nowhere", **given)

    assert "no image to read at nowhere.png (No such file or directory)" in ask("nowhere.png")
    assert "Is a directory" in ask(tmp_path)
    assert "is a damaged image (" in ask(tmp_path / "damaged.png")
    assert "is a damaged image (" in ask(tmp_path / "half.png")
    assert "is empty (0 bytes)" in ask(tmp_path / "empty.png")
    assert "is no image that can be read" in ask(tmp_path / "text.png")
    assert "standard input is empty" in ask("-", given=b"")
    assert "standard input is no image" in ask("-", given=b"hello")
    assert "cannot be fetched (HTTP Error 404" in ask(f"{server}/missing.png")
    assert "page.png is no image" in ask(f"{server}/page.png")
    assert "cannot be fetched (" in ask("http://127.0.0.1:1/picture.png")
    assert "cannot be fetched (" in ask("http://[bad/picture.png")
    assert "put the question in quotes" in refused("ask", picture, "What", "is", "this?", "-m", "x")


def test_an_image_that_is_too_large(picture, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert "too large an image" in refused("ask", picture, QUESTION, "-m", "x")


def test_an_image_that_the_processor_refuses(write, tmp_path):
    Image.new("RGB", (1000, 2)).save(tmp_path / "line.png")
    assert "the processor refuses these images" in refused("ask", tmp_path / "line.png", QUESTION, "-m",
                                                           write("qwen3_vl"))


def test_questions_and_choices_that_contradict(gemma, picture):
    assert "there is no question" in refused("ask", "-m", gemma)
    assert "there is no question" in refused("ask", picture, " ", "-m", gemma)
    assert "stands where the question belongs" in refused("ask", picture, "-m", gemma)
    assert "there is no model" in refused("ask", picture, QUESTION)
    assert "--full prunes nothing" in refused("ask", picture, QUESTION, "-m", gemma, "--full", "--compare")
    assert "--full prunes nothing" in refused("ask", picture, QUESTION, "-m", gemma, "--full", "--ratio", 0)
    assert "give one of them" in refused("ask", QUESTION, "-m", gemma, "--ratio", 0.1, "--plan", "lossless")


def changed(folder, path, **files):
    """A copy of a model's folder with some files replaced, or left out."""
    path.mkdir()
    for file in folder.iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    for name, data in files.items():
        found = next(path.glob(f"{name}.*"))
        found.unlink() if data is None else found.write_bytes(data)
    return path


def test_models_that_are_not_there(gemma, tmp_path, monkeypatch):
    def ask(model, *options):
        return refused("ask", QUESTION, "-m", model, *options)

    assert "there is no model nonsense" in ask("nonsense")
    assert "tiny-qwen3-vl" in ask("nonsense")
    assert "there is no model" in ask(tmp_path / "nowhere")
    assert "there is no model" in ask("./no/where")
    assert "there is no model" in ask(gemma / "config.json")
    assert "has no config.json" in ask(tmp_path)
    assert "install popvlm[gemma]" in ask("unlucky")
    assert "config.json of" in ask(changed(gemma, tmp_path / "a", config=b"{"))
    assert "config.json of" in ask(changed(gemma, tmp_path / "b", config=b'{"model_type": "nonsense"}'))
    said = ask(changed(gemma, tmp_path / "c", config=b'{"model_type": "bert"}'))
    assert "is a bert model, which popvlm cannot prune; use one that loads as Gemma3ForCausalLM, " in said
    assert "the processor of" in ask(changed(gemma, tmp_path / "d", tokenizer=b"{"))
    assert "cannot be loaded" in ask(changed(gemma, tmp_path / "e", model=None))
    cut = (gemma / "model.safetensors").read_bytes()[:999]
    assert "cannot be loaded" in ask(changed(gemma, tmp_path / "f", model=cut))


def test_a_hub_name_without_the_network(monkeypatch):
    from transformers import AutoConfig

    def unreachable(name):
        raise OSError("We couldn't connect to 'https://huggingface.co' to load the files.\nCheck your connection.")

    monkeypatch.setattr(AutoConfig, "from_pretrained", unreachable)
    said = refused("ask", QUESTION, "-m", "Qwen/Qwen3-VL-2B-Instruct")
    assert "the Hugging Face hub does not give it (We couldn't connect to 'https://huggingface.co'" in said


def test_a_model_without_some_of_its_weights(gemma, tmp_path):
    """transformers would make them up."""
    path = changed(gemma, tmp_path / "model")
    weights = load_file(path / "model.safetensors")
    gone = next(name for name in weights if name.endswith("layers.2.mlp.up_proj.weight"))
    del weights[gone]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    assert "has no weights for" in refused("ask", QUESTION, "-m", path)


def test_plans_of_other_models(gemma, tmp_path, monkeypatch):
    """Refused before the weights are read."""
    monkeypatch.setattr("popvlm.answer.load", None)
    other = Fingerprint("llama", LAYERS, 4096, 8, 128, "meta-llama/Llama-3.1-8B")
    PruningPlan(LAYERS, fingerprint=other).save(tmp_path / "other.json")
    PruningPlan.last(36, 0.3).save(tmp_path / "deep.json")

    def ask(*options):
        return refused("ask", QUESTION, "-m", gemma, *options)

    assert "was made for another model (meta-llama/Llama-3.1-8B" in ask("--plan", tmp_path / "other.json")
    assert "for 36 decoder layers and this model has 6" in ask("--plan", tmp_path / "deep.json")
    assert "there is no plan to read" in ask("--plan", "lossy")
    assert "ratio is 1.5" in ask("--ratio", "1.5")
    assert "ratio is -0.1" in ask("--ratio=-0.1")
    assert "ratio is nan" in ask("--ratio", "nan")


def test_devices_that_are_not_there(gemma):
    for device in ["meta", "nonsense", *(() if torch.cuda.is_available() else ("cuda", "cuda:7"))]:
        assert f"there is no device {device} here" in refused("ask", QUESTION, "-m", gemma, "--device", device)


def test_attention_that_is_not_there(gemma, monkeypatch):
    pytest.importorskip("transformers")
    if importlib.util.find_spec("flash_attn"):
        pytest.skip("it is")
    assert "choose another --attention than flash_attention_2" in refused("ask", QUESTION, "-m", gemma, "--attention",
                                                                          "flash_attention_2")


@pytest.mark.parametrize("error", [
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] . DefaultCPUAllocator: can't allocate memory: you tried to "
                 "allocate 99 bytes. Error code 12 (Cannot allocate memory)"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    MemoryError(), OSError(12, "Cannot allocate memory")])
def test_too_little_memory(gemma, picture, error, monkeypatch):
    def short(*args, **kwargs):
        raise error

    from transformers import Gemma3ForConditionalGeneration
    monkeypatch.setattr(Gemma3ForConditionalGeneration, "generate", short)
    assert "too little memory" in refused("ask", QUESTION, "-m", gemma)
    monkeypatch.setattr(Gemma3ForConditionalGeneration, "from_pretrained", short)
    assert "too little memory" in refused("ask", QUESTION, "-m", gemma)


def test_an_unexpected_error_is_not_hidden(gemma, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("a bug")

    monkeypatch.setattr("popvlm.answer.find", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        run("ask", QUESTION, "-m", gemma)


def test_an_image_for_a_text_only_model(write, picture):
    assert "reads text only; leave the images out" in refused("ask", picture, QUESTION, "-m", write("llama"))


def test_ctrl_c(gemma, monkeypatch):
    from transformers import Gemma3ForConditionalGeneration

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(Gemma3ForConditionalGeneration, "generate", interrupted)
    result = run("ask", QUESTION, "-m", gemma)
    assert (result.exit_code, result.output) == (130, "")


# ---- the other commands


def test_demo(gemma, picture, monkeypatch, answer):
    compare = answer.compare
    monkeypatch.setattr(answer, "compare", lambda *args, max_new_tokens: compare(*args, max_new_tokens=6))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "120")
    said = told("demo")
    assert said.count("picture.png") == 2
    assert "[bold]" in said
    assert "of 2 answers are the same" in said
    assert "model = popvlm.accelerate(processor, model)" in said
    got = json.loads(told("demo", "--json"))
    first = got["questions"][0]
    assert (first["image"], first["question"]) == ("picture.png", QUESTION)
    assert first["full"]["text"] == expected(gemma, (picture,), (), 6)[1]
    assert first["pruned"]["text"] == expected(gemma, (picture,), (4, 5), 6)[1]
    assert got["first_token_ratio"] == sum(row["first_token_ratio"] for row in got["questions"]) / 2
    assert "install popvlm[gemma]" in refused("demo", "--model", "unlucky")
    assert "popvlm ask IMAGE \"question\" --model a/b --compare" in refused("demo", "--model", "a/b")


def test_the_python_that_demo_prints_is_python():
    from popvlm.cli import PYTHON

    compile("if True:\n" + PYTHON, "demo", "exec")
    assert max(map(len, PYTHON.splitlines())) < 80


def test_plan_show(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    plan = PruningPlan(48, visual={3, *range(20, 48)}, text={47}, tail=64, source="by hand",
                       fingerprint=Fingerprint("qwen3_vl", 48, 2048, 4, 128, "some/checkpoint"))
    plan.save(tmp_path / "plan.json")
    said = told("plan", "show", tmp_path / "plan.json")
    for kind in "visual", "text":
        strip = "".join(line.removeprefix(kind) for line in said.splitlines() if line.startswith(f"{kind}  "))
        skipped = [index for index, mark in enumerate(strip.replace(" ", "")) if mark == "·"]
        assert skipped == sorted(getattr(plan, kind))
        assert strip.count("█") == 48 - len(skipped)
        assert [len(ten) for ten in strip.split()] == [10, 10, 10, 10, 8]
    assert max(len(line.rstrip()) for line in said.splitlines()[1:]) <= 60
    assert "last 64 positions" in said
    assert "some/checkpoint: qwen3_vl, hidden size 2048, 4 key/value" in " ".join(said.split())
    got = json.loads(told("plan", "show", tmp_path / "plan.json", "--json"))
    saved = json.loads((tmp_path / "plan.json").read_text())
    assert got == {name: saved[name] for name in got}
    assert got.keys() == saved.keys() - {"format"}
    assert "there is no plan to read" in refused("plan", "show", tmp_path / "none.json")


def test_help_and_version():
    assert told("--version") == f"popvlm {popvlm.__version__}\n"
    said = told()
    assert said == told("--help")
    assert "popvlm demo" in said
    assert "ask" in told("ask", "--help")
    assert run("ask", "--nonsense").exit_code == 2


def test_the_command_starts_without_torch():
    """`--help` must not wait for seconds. Without the package around it, whose import brings torch."""
    code = ("import importlib.util, sys; from typer.testing import CliRunner; "
            f"spec = importlib.util.spec_from_file_location('cli', {str(ROOT / 'popvlm/cli.py')!r}); "
            "cli = sys.modules['cli'] = importlib.util.module_from_spec(spec); spec.loader.exec_module(cli); "
            "assert CliRunner().invoke(cli.app, ['ask', '--help']).exit_code == 0; "
            "print('torch' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
