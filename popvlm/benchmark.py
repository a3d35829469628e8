"""Time to first token, measured piece by piece: the full model and the pruned in turn, beside what FLOPs allow."""

from __future__ import annotations

import ctypes
import gc
import json
import platform
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial, wraps
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from scipy.stats import bootstrap
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.generation.streamers import BaseStreamer

from popvlm import cost, prefill, prompts, shapes
from popvlm.answer import out_of_memory
from popvlm.decoders import family_of, fingerprint
from popvlm.plan import KINDS, PruningPlan
from popvlm.prompts import Prompt

SIDES = ("full", "pruned")

Load = Callable[[str, str | None], tuple[Any, Any]]
"""Of a dtype's name and an attention implementation's: the processor, or None, and the model."""


Plans = Mapping[str, Callable[[Any], PruningPlan]]
"""By their names, what makes each for a model."""


class BenchmarkError(ValueError):
    """What cannot be measured; the message names the fix."""


@dataclass(frozen=True)
class Setting:
    """One row of a benchmark: all that its times depend on.

    Args:
        model: a checkpoint's name, or a shape's.
        layers: to which a shape is cut; None for all.
        dtype, attention, device: as they were asked for.
        length: tokens of the prompt that were asked for; a processor may make a few more or less.
        text: of these, tokens of the text.
        batch: prompts at once.
        plan: what the plan is called.
        whole: from the image on, with the vision encoder; False for the decoder alone.
        image: where the picture is from; "" for a drawn one.
        new_tokens: that are written, the first included.
        rounds: pairs of runs, after one that warms up.
        machine: what it runs on.
    """

    model: str
    layers: int | None
    dtype: str
    attention: str | None
    device: str
    length: int
    text: int
    batch: int
    plan: str
    whole: bool
    image: str
    new_tokens: int
    rounds: int
    machine: str


@dataclass(frozen=True)
class Run:
    """One `generate`, in seconds. The first four are all of the time to first token.

    Args:
        preprocessing_s: from decoded images and words to the model's inputs on its device.
        vision_s: the vision encoder and what maps its output to the decoder's width.
        prefill_s: the first forward call, without vision: embedding, decoder, head.
        other_s: what `generate` does beside these: positions, caches, the choice of the token.
        first_decode_s: from the first token to the second.
        tokens_per_s: tokens after the first, of all samples, by the time after it.
    """

    preprocessing_s: float
    vision_s: float
    prefill_s: float
    other_s: float
    first_decode_s: float
    tokens_per_s: float

    @property
    def first_token_s(self) -> float:
        """From decoded images to the first token."""
        return self.preprocessing_s + self.vision_s + self.prefill_s + self.other_s


def timed(model: Any, make: Callable[[], dict[str, Any]], new_tokens: int) -> Run:
    """One greedy `generate`, under whatever plan is on the model.

    Each mark waits until the device has done what it was given. That costs a run nothing: the decoder needs the vision
    encoder's output, and transformers itself asks the device, right after it, whether features and placeholders match.

    Args:
        model: on the CPU or a CUDA device.
        make: returns the arguments of `generate`; timed as preprocessing.
        new_tokens: that are written, 2 or more, whatever they are.
    """
    now = _clock(model.device)
    stream = _Stream(now)
    start = now()
    inputs = make()
    ready = now()
    with _marks(model, now) as (vision, forward):
        _generate(model, inputs, new_tokens, stream)
    first, second, *_ = stream.times
    vision_s = sum(end - begin for begin, end in vision)
    # transformers 4 runs the vision encoder inside the forward call, 5 before it.
    begin, end = forward
    prefill_s = end - begin - sum(done - begun for begun, done in vision if begun >= begin)
    written = (len(stream.times) - 1) * inputs["input_ids"].shape[0]
    return Run(ready - start, vision_s, prefill_s, first - ready - vision_s - prefill_s, second - first,
               written / (stream.times[-1] - first))


def pairs(model: Any, plan: PruningPlan, make: Callable[[], dict[str, Any]], *, rounds: int, new_tokens: int,
          ) -> dict[str, list[Run]]:
    """Runs of the full model and the pruned in turn, `rounds` of each; before them, one of each that is not kept.

    The full model is the untouched one: no plan is on it. Who goes first changes from round to round, so that a
    machine that slows down or speeds up favours neither.
    """
    family = family_of(model)
    runs: dict[str, list[Run]] = {side: [] for side in SIDES}
    for turn in range(rounds + 1):
        for side in SIDES if turn % 2 else SIDES[::-1]:
            with prefill.under(model, plan if side == "pruned" else None, family):
                run = timed(model, make, new_tokens)
            if turn:
                runs[side].append(run)
    return runs


def ratio(full: Sequence[float], pruned: Sequence[float]) -> dict[str, float]:
    """The median over pairs of runs of full over pruned, and its 95 % interval by the bootstrap over pairs."""
    each = np.asarray(full) / np.asarray(pruned)
    found = bootstrap((each,), np.median, method="percentile", rng=np.random.default_rng(0)).confidence_interval
    return {"median": float(np.median(each)), "low": float(found.low), "high": float(found.high)}


def peak_bytes(model: Any, make: Callable[[], dict[str, Any]], new_tokens: int) -> int | None:
    """The most memory that a `generate` holds beyond what was held before it: caches, activations and its inputs.

    On CUDA as torch's allocator counts it, on the CPU as Linux does (the process's resident pages); None elsewhere.
    """
    gc.collect()
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
        torch.cuda.reset_peak_memory_stats(model.device)
        before = torch.cuda.memory_allocated(model.device)
        _generate(model, make(), new_tokens)
        return torch.cuda.max_memory_allocated(model.device) - before
    try:
        ctypes.CDLL(None).malloc_trim(0)  # or the pages that an earlier run left would serve this one unseen
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    except (OSError, AttributeError):
        return None
    before = _resident("VmRSS")
    _generate(model, make(), new_tokens)
    return _resident("VmHWM") - before


def from_shape(name: str, layers: int | None, dtype: str, attention: str | None, device: str) -> Any:
    """A model of a published shape (`popvlm.shapes`) with random weights.

    Raises:
        BenchmarkError: there is no such shape, depth, device or attention implementation here.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        config = shapes.config(name, layers)
        auto: Any = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
        torch.manual_seed(0)
        with torch.device(device), torch.no_grad():
            model = auto.from_config(config, dtype=getattr(torch, dtype), attn_implementation=attention).eval()
            for weight in model.parameters():
                if weight.ndim > 1 and not weight.any():  # Gemma-3's projector: zeros would be easier on a device
                    weight.normal_(std=0.02)
    except (ValueError, ImportError, AssertionError, NotImplementedError) as error:
        raise BenchmarkError(f"{name} cannot be built ({' '.join(str(error).split())}); give another --shape, "
                             "--layers, --device or --attention") from error
    return model


def candidates(ratios: Sequence[float], positions: Sequence[str], kvs: Sequence[str], text: int) -> Plans:
    """Plans to time: the last layers of a model.

    Args:
        ratios: shares of the layers.
        positions: that skip them: "all" context, "visual" positions alone, or all before the "question", which leaves
            the prompt's last `text` tokens active: a plain suffix.
        kvs: "own", or "fitted" with random matrices of the right sizes, as their values do not matter to a time.
        text: tokens of the question.

    Raises:
        PlanError: a ratio that is none.
    """
    for ratio in ratios:
        PruningPlan.last(1, ratio)  # refused here, before a model is loaded
    return {f"{100 * ratio:.0f} %, {who}, {kv}": partial(_candidate, ratio, who, kv, text)
            for ratio in ratios for who in positions for kv in kvs}


def given(files: Sequence[Path]) -> Plans:
    """Plans that were saved.

    Raises:
        PlanError: one cannot be read.
    """
    loaded = {file: PruningPlan.load(file) for file in files}
    return {f"{file}: {plan!r}": partial(_itself, plan) for file, plan in loaded.items()}


def run(load: Load, settings: Sequence[Setting], plans: Plans, *, image: Image.Image | None = None,
        kept: Path | None = None, say: Callable[[str], None] = lambda step: None) -> list[dict[str, Any]]:
    """Measures each setting, in order, and returns their rows.

    Args:
        load: gives the processor and the model; called once for each dtype and attention implementation that has
            something left to measure.
        settings: what to measure; those that differ in dtype or attention only at their outermost.
        plans: for each plan's name in the settings, what makes it for a model.
        image: the picture to ask about, where there is a processor; a drawn one if left out.
        kept: a file to which each row is added, as a line of JSON, when it is there. Settings that it has are not
            measured again.
        say: is told each step.

    Raises:
        BenchmarkError: nothing could be measured, or `kept` has lines that are no rows.
    """
    rows = _read(kept) if kept else {}
    wanted = list(dict.fromkeys(settings))
    left = [setting for setting in wanted if setting not in rows]
    for (dtype, attention), some in groupby(left, lambda setting: (setting.dtype, setting.attention)):
        say(f"loading the model in {dtype}" + (f" with {attention}" if attention else ""))
        processor, model = load(dtype, attention)
        picture = image or (prompts.photograph() if processor is not None else None)
        for name, of_plan in groupby(some, lambda setting: setting.plan):
            plan = _placed(plans[name](model), model)
            for setting in of_plan:
                say(f"{setting.length} tokens, batch {setting.batch}: {name}")
                try:
                    row = _row(setting, plan, processor, model, picture)
                except (RuntimeError, MemoryError) as error:
                    if not out_of_memory(error):
                        raise
                    row = f"{setting.length} tokens at batch {setting.batch} do not fit into memory"
                if isinstance(row, str):
                    warnings.warn(f"popvlm: {name}: {row}; left out", stacklevel=2)
                    continue
                rows[setting] = row
                if kept:
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    with kept.open("a") as lines:
                        lines.write(json.dumps(row) + "\n")
        del processor, model, plan  # before the next one comes
        gc.collect()
    if not any(setting in rows for setting in wanted):
        raise BenchmarkError("nothing could be measured; take shorter prompts, a smaller batch, or another plan or "
                             "--attention")
    return [rows[setting] for setting in wanted if setting in rows]


def machine(device: str = "auto") -> str:
    """What this runs on: the name of the device, threads, and the versions of torch and transformers."""
    on_gpu = torch.cuda.is_available() and not device.startswith("cpu")
    name = torch.cuda.get_device_name() if on_gpu else processor_name()
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{name}, {torch.get_num_threads()} threads, {versions}"


def processor_name() -> str:
    """The CPU's name, where the system tells it."""
    try:
        told = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        told = None
    return told[1] if told else platform.processor() or platform.machine()


def _row(setting: Setting, plan: PruningPlan, processor: Any, model: Any, picture: Image.Image | None,
         ) -> dict[str, Any] | str:
    """The setting measured, or why it cannot be."""
    asked = _asked(setting, processor, model, picture)
    family = family_of(model)
    with warnings.catch_warnings(), prefill.under(model, plan, family):
        warnings.simplefilter("ignore")  # it says the same
        replacement = prefill.pruned(model)
        assert replacement is not None
        if replacement.positions(asked.make() | {"logits_to_keep": 1}) is None:
            return f"with {setting.attention or 'this attention'} a prompt of {setting.length} tokens runs in full"
    runs = pairs(model, plan, asked.make, rounds=setting.rounds, new_tokens=setting.new_tokens)
    peaks = {}
    for side in SIDES:
        with prefill.under(model, plan if side == "pruned" else None, family):
            peaks[side] = peak_bytes(model, asked.make, setting.new_tokens)
    flops = {side: cost.prefill_flops(model.config, plan if side == "pruned" else None, asked.visual, asked.text,
                                      batch=setting.batch, images=max(1, asked.images)) for side in SIDES}
    limits = {"prefill": cost.limit(model.config, plan, asked.visual, asked.text)}
    limits["first_token"] = flops["full"].total / flops["pruned"].total if setting.whole else limits["prefill"]
    ratios = {"prefill": ratio(*([run.prefill_s for run in runs[side]] for side in SIDES)),
              "first_token": ratio(*([run.first_token_s for run in runs[side]] for side in SIDES)),
              "decode": ratio(*([1 / run.tokens_per_s for run in runs[side]] for side in SIDES))}
    medians = {side: {name: median(getattr(run, name) for run in runs[side])
                      for name in ("first_token_s", *Run.__dataclass_fields__)} for side in SIDES}
    return {"setting": asdict(setting),
            "prompt": {"visual": asked.visual, "text": asked.text, "images": asked.images},
            "plan": {"visual": sorted(plan.visual), "text": sorted(plan.text), "tail": plan.tail, "kv": plan.kv},
            "ratio": ratios, "limit": limits, "reached": ratios["prefill"]["median"] / limits["prefill"],
            "median": medians, "peak_bytes": peaks,
            "fitted_bytes": sum(part.nbytes for part in (plan.fitted or {}).values()),
            "flops": {side: asdict(flops[side]) for side in SIDES},
            "runs": {side: [asdict(run) for run in runs[side]] for side in SIDES}}


def _asked(setting: Setting, processor: Any, model: Any, picture: Image.Image | None) -> Prompt:
    if processor is not None and setting.whole and picture is not None:
        return prompts.real(processor, model, picture, setting.length, setting.text, setting.batch)
    return prompts.synthetic(model, setting.length, setting.text, setting.batch, pixels=setting.whole)


def _read(kept: Path) -> dict[Setting, dict[str, Any]]:
    if not kept.exists():
        return {}
    found = {}
    for number, line in enumerate(kept.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            found[Setting(**row["setting"])] = row
        except (ValueError, TypeError, KeyError) as error:
            raise BenchmarkError(f"line {number} of {kept} is no row of a benchmark; delete that line, or give another "
                                 "--out") from error
    return found


def _candidate(ratio: float, positions: str, kv: str, text: int, model: Any) -> PruningPlan:
    this = fingerprint(model)
    plan = PruningPlan.last(this.num_layers, ratio, tail=text if positions == "question" else 1)
    none: frozenset[int] = frozenset()
    plan = replace(plan, visual=plan.visual if hasattr(model.config, "vision_config") else none,
                   text=none if positions == "visual" else plan.text, fingerprint=this)
    return replace(plan, fitted=_random_fit(plan, model)) if kv == "fitted" else plan


def _itself(plan: PruningPlan, model: Any) -> PruningPlan:
    return plan


def _random_fit(plan: PruningPlan, model: Any) -> dict[str, Tensor]:
    this = fingerprint(model)
    outputs, width = 2 * this.num_key_value_heads * this.head_dim, this.hidden_size
    options: dict[str, Any] = dict(dtype=model.dtype, device=model.device)
    made = {}
    for kind in KINDS:
        for layer in getattr(plan, kind):
            made[f"{kind}.{layer}.weight"] = torch.randn(outputs, width, **options) / width ** 0.5
            made[f"{kind}.{layer}.bias"] = torch.zeros(outputs, **options)
    return made


def _placed(plan: PruningPlan, model: Any) -> PruningPlan:
    """The plan with its fits where and as they are used: a run would convert them each time it is put on."""
    plan.check(fingerprint(model))
    if plan.fitted is None:
        return plan
    return replace(plan, fitted={name: part.to(model.device, model.dtype) for name, part in plan.fitted.items()})


class _Stream(BaseStreamer):
    """Notes when each token came: `generate` copies it to the CPU, so it is computed by then."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now, self.times, self.prompt = now, list[float](), True

    def put(self, value: Any) -> None:
        if not self.prompt:
            self.times.append(self.now())
        self.prompt = False

    def end(self) -> None:
        pass


def _clock(device: torch.device) -> Callable[[], float]:
    """Seconds, once the device has done all that it was given."""
    if device.type == "cpu":
        return time.perf_counter
    if device.type != "cuda":
        raise BenchmarkError(f"the times of {device.type} are not known to be right: transformers streams its tokens "
                             "late; give --device cpu or cuda")

    def now() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return now


def _generate(model: Any, inputs: dict[str, Any], new_tokens: int, stream: BaseStreamer | None = None) -> None:
    # Other than those of a user's own settings: one sample, one path, no early end.
    model.generate(**inputs, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, num_beams=1,
                   streamer=stream)


@contextmanager
def _marks(model: Any, now: Callable[[], float]) -> Iterator[tuple[list[tuple[float, float]], list[float]]]:
    """When each pass of the vision encoder, and the first forward call, began and ended."""
    vision: list[tuple[float, float]] = []
    forward: list[float] = []

    def begin(module: Any, args: Any) -> None:
        if not forward:
            forward.append(now())

    def end(module: Any, args: Any, output: Any) -> None:
        if len(forward) == 1:
            forward.append(now())

    handles = [model.register_forward_pre_hook(begin), model.register_forward_hook(end)]
    encode = getattr(model.model, "get_image_features", None)
    if encode is not None:
        @wraps(encode)
        def encoded(*args: Any, **kwargs: Any) -> Any:
            begun = now()
            output = encode(*args, **kwargs)
            vision.append((begun, now()))
            return output

        model.model.get_image_features = encoded
    try:
        yield vision, forward
    finally:
        if encode is not None:
            del model.model.get_image_features
        for handle in handles:
            handle.remove()


def _resident(what: str) -> int:
    """A line of Linux's account of this process, in bytes."""
    found = re.search(rf"^{what}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return 1024 * int(found[1])
