"""The command `popvlm`.

torch and transformers take seconds to import, so a command imports them when it has checked what it can without them.
An error that popvlm raises is one sentence that names the fix: it goes to stderr, with exit code 2.
"""

from __future__ import annotations

import io
import json
import logging
import os
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal
from urllib.request import Request, urlopen

import typer
from PIL import Image, ImageOps
from rich.console import Console
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

if TYPE_CHECKING:
    from popvlm.answer import Answer
    from popvlm.plan import PruningPlan


class CommandError(Exception):
    """What the user asked for cannot be done; the message is one sentence that names the fix."""


class _Commands(TyperGroup):
    """Runs a command quietly, and tells what popvlm raises in one sentence."""

    def invoke(self, ctx: Any) -> Any:
        for stream in sys.stdout, sys.stderr:
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # an answer may have what the terminal's encoding has not
        try:
            with _quiet():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except typer.Exit:
            raise
        except Exception as error:
            if type(error).__module__.split(".")[0] == "popvlm":  # whose errors are all for the user, in a sentence
                said = str(error)
            elif _out_of_memory(error):
                said = ("there is too little memory for this model and prompt; take a smaller model or image, "
                        "--dtype bfloat16 or another --device")
            else:
                raise
            stderr = Console(stderr=True)
            stderr.print(Text.assemble(("popvlm: ", "bold red"), _printable(" ".join(said.split()))), soft_wrap=True)
            raise typer.Exit(2) from None


app = typer.Typer(cls=_Commands, rich_markup_mode="rich", pretty_exceptions_enable=False, add_completion=False,
                  context_settings={"help_option_names": ["-h", "--help"]})
plans = typer.Typer(help="Pruning plans: which positions of a prompt skip which layers.", no_args_is_help=True)
app.add_typer(plans, name="plan")

STORY = "\n\n".join((  # a paragraph is one line: the terminal's width breaks it
    "[bold]popvlm[/bold] makes vision-language models answer sooner, by Prefill-Only Pruning (POP, arXiv 2602.03295).",
    "While a model reads the prompt, which is mostly image, its deep layers do only the work that later tokens need "
    "of them; while it writes the answer, the whole model runs. No retraining, no changed weights.",
    "[bold]First[/bold], a small model that comes with the package, full and pruned side by side (half a minute, no "
    "GPU, no network):",
    "  [cyan]popvlm demo[/cyan]",
    "[bold]Then your model and your image[/bold]; --compare runs the full model too:",
    '  [cyan]popvlm ask photo.jpg "What is this?" -m Qwen/Qwen3-VL-2B-Instruct --compare[/cyan]',
    "[bold]A plan for your model[/bold], measured before it is used, on your own images or a built-in mix:",
    "  [cyan]popvlm calibrate -m google/gemma-3-4b-it --data my_images/ --out plan[/cyan]",
    "  [cyan]popvlm plan show plan/plan.json[/cyan]",
    '  [cyan]popvlm ask photo.jpg "What is this?" -m google/gemma-3-4b-it --plan plan/plan.json[/cyan]',
    "[bold]How much sooner[/bold], on this machine, for a model's size or your own model:",
    "  [cyan]popvlm benchmark --shape qwen3-vl-2b --layers 4 --decoder-only[/cyan]",
))
PYTHON = """\
    import popvlm
    from transformers import AutoModelForImageTextToText, AutoProcessor

    name = "Qwen/Qwen3-VL-8B-Instruct"
    processor = AutoProcessor.from_pretrained(name)
    model = AutoModelForImageTextToText.from_pretrained(name, dtype="auto")
    model = popvlm.accelerate(processor, model)  # and generate as before
"""

Dtype = Annotated[Literal["auto", "float32", "bfloat16", "float16"], typer.Option(
    help="The weights' type; 'auto' is the checkpoint's.")]
Device = Annotated[str, typer.Option(help="'auto', 'cpu', 'cuda', 'cuda:1', 'mps', ...")]
Attention = Annotated[Literal["sdpa", "eager", "flash_attention_2"] | None, typer.Option(
    help="The attention implementation; transformers' choice if left out.", show_default=False)]
DTYPES = ("auto", "bfloat16", "float16", "float32")  # of options that typer cannot check, as they may be several
ATTENTIONS = ("sdpa", "eager", "flash_attention_2")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else, on standard output.")]


@app.callback(invoke_without_command=True, help=STORY)
def main(context: typer.Context,
         version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False) -> None:
    if version:
        from popvlm import __version__
        typer.echo(f"popvlm {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def ask(
    sources: Annotated[list[str] | None, typer.Argument(metavar="IMAGE", show_default=False, help=(
        "A path, a URL, or - for standard input; none for a question about text."))] = None,
    question: Annotated[str, typer.Argument(metavar='"QUESTION"', show_default=False, help="Last, in quotes.")] = "",
    model: Annotated[str, typer.Option("--model", "-m", show_default=False, help=(
        "A model's folder, a name on the Hugging Face hub, or an embedded model such as tiny-qwen3-vl."))] = "",
    plan: Annotated[str | None, typer.Option(metavar="FILE", help=(
        "A plan's file, 'auto' (calibrated for this model once, and kept), 'last-third' (the paper's recipe) or "
        "'lossless' (only the last layer). If left out: a plan that is there for this model, or last-third."))] = None,
    ratio: Annotated[float | None, typer.Option(help="Skip this share of the layers, the last ones.")] = None,
    full: Annotated[bool, typer.Option("--full", help="Run the full model.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Run both, full and pruned, side by side.")] = False,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The longest answer, in tokens.")] = 256,
    dtype: Dtype = "auto", device: Device = "auto", attention: Attention = None, as_json: AsJson = False,
) -> None:
    """Asks a model about images: prints the answer as it is written, then how soon it came."""
    if question == "-" or question.startswith(("http://", "https://")) or os.path.isfile(question):
        raise CommandError(f"{question} stands where the question belongs; write the question last, in quotes")
    if not question.strip():
        raise CommandError('there is no question; write it last, in quotes: popvlm ask photo.jpg "What is this?"')
    if not model:
        raise CommandError("there is no model; give --model a folder, a name on the Hugging Face hub, or "
                           "tiny-qwen3-vl, which comes with popvlm")
    if full and (compare or plan is not None or ratio is not None):
        raise CommandError("--full prunes nothing; leave it out, or leave out --compare, --plan and --ratio")
    if plan is not None and ratio is not None:
        raise CommandError("--plan and --ratio each say what to prune; give one of them")
    images = [read_image(source) for source in sources or ()]  # before the model, which takes longer

    import popvlm
    from popvlm import answer

    say = _steps(as_json)
    found = answer.find(model, say)
    if images and not found.reads_images:
        raise CommandError(f"{model} reads text only; leave the images out, or take a vision-language model")
    given = None if full else _given(found, plan, ratio)
    say(f"loading {model}")
    processor, loaded = answer.load(found, dtype=dtype, device=device, attention=attention)
    if not full:
        popvlm.accelerate(processor, loaded, plan=given or _known(loaded))
    chosen = popvlm.plan_of(loaded)
    record = {"model": model, "images": sources or [], "question": question, "plan": chosen and _plan_record(chosen)}
    if compare:
        both = answer.compare(processor, loaded, images, question, max_new_tokens=max_new_tokens)
        if as_json:
            return _print_json(record | _pair_record(*both))
        table = Table(title=_printable(question), title_justify="left")
        for name in "", "answer", "first token", "then":
            table.add_column(name, overflow="fold", ratio=1 if name == "answer" else None)
        for name, got in zip(("full", "pruned"), both):
            table.add_row(name, _cell(got.text), _seconds(got.first_token_s), _rate(got))
        console = _console()
        console.print(table)
        same = "the same answer" if both[0].text == both[1].text else "answers differ"
        console.print(f"first token [bold]{_times(*both)}[/] as fast; {same}; {both[0].prompt_tokens} prompt tokens")
    else:
        write = _ignore if as_json else _write
        got = answer.answer(processor, loaded, images, question, max_new_tokens=max_new_tokens, write=write)
        if as_json:
            return _print_json(record | asdict(got))
        console = _console()
        console.print(f"\n\nfirst token in [bold]{_seconds(got.first_token_s)}[/], then {_rate(got)} "
                      f"({got.prompt_tokens} tokens read, {got.tokens} written)", soft_wrap=True)
    console.print(Text(_in_a_line(chosen) if chosen else "the full model, no plan"), soft_wrap=True)


@app.command()
def demo(
    model: Annotated[str, typer.Option("--model", "-m", help=(
        "tiny-qwen3-vl, or gemma-3-270m-vision (with popvlm\\[gemma]), whose decoder is where the time goes."))
    ] = "tiny-qwen3-vl",
    as_json: AsJson = False,
) -> None:
    """Asks a small model that comes with popvlm about images, full and pruned side by side; no network."""
    os.environ["HF_HUB_OFFLINE"] = "1"

    import popvlm
    from popvlm import answer, embedded

    if model not in embedded.NAMES:
        raise CommandError(f"the demo is for {' and '.join(embedded.NAMES)}; ask another model with "
                           f"popvlm ask IMAGE \"question\" --model {model} --compare")
    say = _steps(as_json)
    processor, loaded = answer.load(answer.find(model, say), device="cpu")
    popvlm.accelerate(processor, loaded, plan=_known(loaded))
    plan = popvlm.plan_of(loaded)
    assert plan is not None
    rows = []
    console = _console()
    table = Table(title=f"{model}: answers, and seconds to the first token", title_justify="left")
    for column in "image", "question", "full answers", "pruned answers":
        table.add_column(column, overflow="fold", ratio=1)
    for column in "full", "pruned", "speed-up":
        table.add_column(column, justify="right", no_wrap=True)
    for path, question in embedded.demo_questions():
        both = answer.compare(processor, loaded, [read_image(str(path))], question, max_new_tokens=32)
        rows.append({"image": path.name, "question": question} | _pair_record(*both))
        table.add_row(path.name, _cell(question), *(_cell(got.text) for got in both),
                      *(f"{got.first_token_s:.3f}" for got in both), _times(*both))
    ratio = statistics.median(row["first_token_ratio"] for row in rows)
    if as_json:
        return _print_json({"model": model, "plan": _plan_record(plan), "questions": rows, "first_token_ratio": ratio})
    same = sum(row["same_answer"] for row in rows)
    console.print(table)
    console.print(f"{same} of {len(rows)} answers are the same; the first token comes [bold]{ratio:.2f}x[/] as fast "
                  "(median)")
    console.print(Text(_in_a_line(plan)))
    console.print("\nOn your own model:\n")
    console.print(Text(PYTHON), soft_wrap=True)
    console.print('or  [cyan]popvlm ask IMAGE "question" --model Qwen/Qwen3-VL-8B-Instruct --compare[/]',
                  soft_wrap=True)


@app.command()
def calibrate(
    model: Annotated[str, typer.Option("--model", "-m", show_default=False, help=(
        "A model's folder, a name on the Hugging Face hub, or an embedded model such as tiny-qwen3-vl."))] = "",
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write to.")] = Path("plan"),
    data: Annotated[Path | None, typer.Option(show_default=False, help=(
        "What to calibrate on: a folder of images, a parquet, CSV or JSON lines file with columns question and image, "
        "or a recipe (YAML); a built-in mix of drawn images and texts if left out."))] = None,
    samples: Annotated[int, typer.Option(min=8, help="How many prompts; every fourth is held out.")] = 128,
    divergence: Annotated[float | None, typer.Option(show_default=False, help=(
        "The largest mean KL of the first token, in nats; 0.01 if no budget is given."))] = None,
    agreement: Annotated[float, typer.Option(help="Beside it, the least share of prompts with the same first token."
                                             )] = 0.98,
    speedup: Annotated[float | None, typer.Option(show_default=False, help=(
        "Or: the speed-up of the decoder's prefill to reach, as its arithmetic allows it."))] = None,
    ratio: Annotated[float | None, typer.Option(show_default=False, help="Or: the share of layers to skip.")] = None,
    kv: Annotated[Literal["fitted", "own"], typer.Option(
        help="Keys and values of skipped positions: fitted, or the layers' own as in the paper.")] = "fitted",
    gates: Annotated[bool, typer.Option("--gates", help=(
        "Score the layers by virtual gates too: a plot, and the sets of layers that they hold cheapest are tried."
    ))] = False,
    dtype: Dtype = "auto", device: Device = "auto", attention: Attention = None, as_json: AsJson = False,
) -> None:
    """Finds a plan for a model by what it costs on held-out prompts: writes the plan and a report.

    Into the folder: plan.json (for --plan and accelerate), report.html, record.json, profile.safetensors (with gates).
    An interrupted run goes on with the same command. On several GPUs: accelerate launch -m popvlm calibrate ...
    """
    if not model:
        raise CommandError("there is no model; give --model a folder, a name on the Hugging Face hub, or "
                           "tiny-qwen3-vl, which comes with popvlm")
    from popvlm import answer, recipes, report
    from popvlm import calibrate as calibration
    from popvlm.decoders import identity
    from popvlm.samples import BuiltinMix, Prepared
    from popvlm.selection import Budget

    budget = Budget(ratio, speedup, divergence, agreement)
    first = True
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from accelerate import PartialState
        device = str(PartialState().device)
        first = os.environ.get("RANK", "0") == "0"
    say = _steps(as_json or not first)
    found = answer.find(model, say)
    say(f"loading {model}")
    processor, loaded = answer.load(found, dtype=dtype, device=device, attention=attention)
    prompts = Prepared(processor, BuiltinMix(samples) if data is None else recipes.load(data, samples))
    which = "mix" if data is None else calibration.digest(prompts)
    state = out / f"state-{identity(loaded)}-{which}"
    with calibration.progress(f"calibrating {model} for {budget}", quiet=not first) as (tell, track):
        got = calibration.calibrate(processor, loaded, prompts, budget=budget, kv=kv, gates=gates, state=state,
                                    say=tell, track=track)
    if not first:
        return
    got.plan.save(out / "plan.json")
    (out / "record.json").write_text(json.dumps(got.record(), indent=1))
    (out / "report.html").write_text(report.html(got), encoding="utf-8")
    if got.profile:
        got.profile.save(out / "profile.safetensors")
    if as_json:
        return _print_json(got.record() | {"plan": _plan_record(got.plan), "out": str(out)})
    console = _console()
    if not got.choice.met:
        console.print(f"[bold]no plan meets {budget}; this is the nearest[/]", soft_wrap=True)
    console.print(Text(_in_a_line(got.plan), style="bold"), soft_wrap=True)
    console.print(Text(_printable(got.plan.source)), soft_wrap=True)
    console.print(f"in {out}: plan.json, report.html, record.json; use it with --plan {out / 'plan.json'}",
                  soft_wrap=True)


@app.command()
def benchmark(
    model: Annotated[str, typer.Option("--model", "-m", show_default=False, help=(
        "A model's folder, a name on the Hugging Face hub, or an embedded model: real weights, real prompts."))] = "",
    shape: Annotated[str, typer.Option(show_default=False, help=(
        "Or a published model's shape, such as qwen3-vl-8b or gemma-3-12b, with random weights."))] = "",
    layers: Annotated[int | None, typer.Option(show_default=False, help=(
        "Cut the shape to its first layers; all if left out."))] = None,
    length: Annotated[list[int] | None, typer.Option(show_default="512, 1024 and 2048", help=(
        "Tokens of the prompt. This and what follows may be given several times."))] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, show_default="1", help="Prompts at once.")] = None,
    ratio: Annotated[list[float] | None, typer.Option(show_default="1/3 and 0.6", help=(
        "Skip this share of the layers, the last ones."))] = None,
    positions: Annotated[list[str] | None, typer.Option(metavar="all|visual|question", show_default="all", help=(
        "Who skips them: all context, visual positions alone, or all before the question."))] = None,
    kv: Annotated[list[str] | None, typer.Option(metavar="own|fitted", show_default="own", help=(
        "Their keys and values: the layers' own, or fitted (random matrices, which take the same time)."))] = None,
    plan: Annotated[list[Path] | None, typer.Option(metavar="FILE", show_default=False, help=(
        "A plan's file, in place of --ratio, --positions and --kv."))] = None,
    dtype: Annotated[list[str] | None, typer.Option(metavar="|".join(DTYPES), help="The weights' type.",
                                                    show_default="auto, and bfloat16 for a shape")] = None,
    attention: Annotated[list[str] | None, typer.Option(metavar="|".join(ATTENTIONS), show_default=False, help=(
        "Attention implementations; transformers' choice if left out."))] = None,
    text: Annotated[int, typer.Option(min=1, help=(
        "Tokens of the question, with what stands around it; the others of --length are visual."))] = 64,
    decoder_only: Annotated[bool, typer.Option("--decoder-only", help=(
        "Leave the images out and keep their tokens: no preprocessing, no vision encoder."))] = False,
    image: Annotated[str, typer.Option(show_default=False, help=(
        "The picture that --model is asked about; a drawn one if left out."))] = "",
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens that are written.")] = 16,
    rounds: Annotated[int, typer.Option(min=2, help="Pairs of runs, full and pruned in turn.")] = 5,
    device: Annotated[str, typer.Option(help="'auto', 'cpu', 'cuda', 'cuda:1'.")] = "auto",
    out: Annotated[Path | None, typer.Option(metavar="FILE", show_default=False, help=(
        "Add each result to this file as soon as it is there, and measure what is missing in it only."))] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", show_default=False, help=(
        "Draw speed-up against length, with what FLOPs allow."))] = None,
    as_json: AsJson = False,
) -> None:
    """Times the first token piece by piece, full and pruned in turn, beside what the arithmetic allows."""
    if bool(model) == bool(shape):
        raise CommandError("give either --model, for a model with its weights, or --shape, for random ones of its size")
    if layers is not None and model:
        raise CommandError("--layers cuts a --shape, and a --model is measured whole; leave it out")
    if image and (shape or decoder_only):
        raise CommandError("--image is for a --model with its vision encoder; leave it out")
    for option, chosen, known in (("positions", positions, ("all", "visual", "question")),
                                  ("kv", kv, ("own", "fitted")), ("dtype", dtype, DTYPES),
                                  ("attention", attention, ATTENTIONS)):
        if odd := [one for one in chosen or () if one not in known]:
            raise CommandError(f"--{option} is {odd[0]}; give one of {', '.join(known)}")
    if shape and "auto" in (dtype or ()):
        raise CommandError("a --shape has no weights whose type --dtype auto could take; give bfloat16, say")
    lengths = length or [512, 1024, 2048]
    if min(lengths) <= text + 2:
        raise CommandError(f"a prompt of {min(lengths)} tokens has no room for an image beside {text} tokens of text; "
                           "give a longer --length or a smaller --text")
    if plan and (ratio or positions or kv):
        raise CommandError("--plan says what to prune; leave out --ratio, --positions and --kv")
    for file in (out, plot):
        if file is not None and file.is_dir():
            raise CommandError(f"{file} is a folder; give the path of a file in it")
    picture = read_image(image) if image else None

    from popvlm import answer, benchmark_report
    from popvlm import benchmark as bench

    if plot is not None and not benchmark_report.can_draw(plot):
        raise CommandError(f"{plot} names no format that a plot can be written in; let it end in .png, .svg or .pdf")
    say = _steps(as_json)
    plans = bench.given(plan) if plan else bench.candidates(ratio or [1 / 3, 0.6], positions or ["all"],
                                                            kv or ["own"], text)
    load: bench.Load
    if model:
        found = answer.find(model, say)
        load = lambda dtype, attention: answer.load(found, dtype=dtype, device=device, attention=attention)  # noqa: E731
    else:
        load = lambda dtype, attention: (None, bench.from_shape(shape, layers, dtype, attention, device))  # noqa: E731
    settings = [bench.Setting(model or shape, layers, kind, kernel, device, tokens, text, samples, name,
                              not decoder_only, image, new_tokens, rounds, bench.machine(device))
                for kind in dtype or ["auto" if model else "bfloat16"] for kernel in (*(attention or ()),) or (None,)
                for name in plans for samples in batch or [1] for tokens in lengths]
    rows = bench.run(load, settings, plans, image=picture, kept=out, say=say)
    if plot is not None:
        plot.parent.mkdir(parents=True, exist_ok=True)
        benchmark_report.plot(rows).savefig(plot, dpi=150)
    if as_json:
        return _print_json(rows)
    console = _console()
    for table in (*benchmark_report.tables(rows), benchmark_report.pieces(rows)):
        console.print(table)


@plans.command()
def show(file: Annotated[Path, typer.Argument(help="A plan that PruningPlan.save wrote.")],
         as_json: AsJson = False) -> None:
    """Prints a plan: which layers visual and text positions skip, and the model that it was made for."""
    from popvlm import PruningPlan

    plan = PruningPlan.load(file)
    if as_json:
        return _print_json(_plan_record(plan))
    console = _console()
    console.print(Text(_in_a_line(plan), style="bold"), soft_wrap=True)
    runs, skips = ("█", "·") if console.encoding.startswith("utf") else ("#", ".")
    tens = max(1, (console.width - 8) // 11) * 10  # layers a line
    for start in range(0, plan.num_layers, tens):
        layers = range(start, min(start + tens, plan.num_layers))
        console.print()
        console.print(Text("layer   " + "".join(f"{layer:<11}" for layer in layers[::10]).rstrip(), style="dim"))
        for kind in "visual", "text":
            strip = "".join((skips if kind in plan.skips(layer) else runs) + " " * (layer % 10 == 9)
                            for layer in layers)
            console.print(Text.assemble(f"{kind:<8}", (strip.rstrip(), "cyan")))
    console.print(f"\n{runs} runs   {skips} skipped in prefill\n")
    made_for = plan.fingerprint
    model = "any model of so many layers" if made_for is None else (
        f"{made_for.checkpoint or 'a checkpoint without a name'}: {made_for.family}, hidden size "
        f"{made_for.hidden_size}, {made_for.num_key_value_heads} key/value heads of {made_for.head_dim}")
    facts = Table.grid(padding=(0, 2))
    facts.add_row("tail", f"the last {plan.tail} positions of a prompt run in full" if plan.tail > 1 else
                  "the last position of a prompt runs in full")
    facts.add_row("KV", "own: the layers' own projections make skipped positions' keys and values" if plan.kv == "own"
                  else "fitted: projections from calibration make skipped positions' keys and values")
    facts.add_row("model", Text(_printable(model)))
    if plan.source:
        facts.add_row("source", Text(_printable(plan.source)))
    console.print(facts)


def read_image(source: str) -> Image.Image:
    """An image in RGB, upright by its EXIF orientation, on white where it is transparent; an animation's first frame.

    Args:
        source: a path, an http or https URL, or "-" for standard input.

    Raises:
        CommandError: it is not there, or no image, or a damaged one.
    """
    if source == "-":
        source = "standard input"
        data = b"" if sys.stdin.isatty() else sys.stdin.buffer.read()
    elif source.startswith(("http://", "https://")):
        try:
            with urlopen(Request(source, headers={"User-Agent": "popvlm"}), timeout=30) as response:
                data = response.read()
        except (OSError, HTTPException, ValueError) as error:
            raise CommandError(f"{source} cannot be fetched ({error}); check the address and the network, or give a "
                               "file") from error
    else:
        try:
            data = Path(source).expanduser().read_bytes()
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise CommandError(f"there is no image to read at {source} ({why}); give an image's path, a URL or -, and "
                               "put the question in quotes") from error
    if not data:
        raise CommandError(f"{source} is empty (0 bytes); give an image")
    try:
        image = Image.open(io.BytesIO(data))
    except Image.DecompressionBombError as error:
        raise CommandError(f"{source} is too large an image ({error}); give a smaller one") from error
    except Exception as error:
        raise CommandError(f"{source} is no image that can be read; give a PNG, JPEG, WebP or GIF, say") from error
    try:
        return _rgb(ImageOps.exif_transpose(image))
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise anything on a damaged file
        raise CommandError(f"{source} is a damaged image ({error}); fetch or save it again") from error


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode[0] in "IF":  # 16 or 32 bits a pixel, which convert would clip and not scale
        highest: Any = 65535 if image.mode.startswith("I;16") else image.getextrema()[1]
        top = next((peak for peak in (1, 255, 65535) if highest <= peak), highest)
        image = image.convert("F").point(lambda value: value * (255 / top) + 0).convert("L")
    if "A" in image.getbands() or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def _given(found: Any, plan: str | None, ratio: float | None) -> PruningPlan | str | None:
    """What the user asked to put on, refused before the weights are read if it is another model's."""
    from popvlm import PruningPlan

    layers = found.fingerprint.num_layers
    if ratio is not None:
        return PruningPlan.last(layers, ratio)
    if plan in (None, "auto", "last-third", "lossless"):
        return plan
    loaded = PruningPlan.load(plan)
    loaded.check(found.fingerprint)
    return loaded


def _known(model: Any) -> PruningPlan | str:
    """What is there for this model, without calibrating."""
    from popvlm.calibrate import known

    kept = known(model)
    return kept[0] if kept else "last-third"


@contextmanager
def _quiet() -> Iterator[None]:
    """Holds back the libraries' warnings; popvlm's own are told in a line each."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("default", message="popvlm: ")
        warnings.showwarning = lambda message, *_, **__: typer.echo(str(message), err=True)
        try:
            yield
        finally:
            logging.disable(level)


def _out_of_memory(error: Exception) -> bool:
    if not isinstance(error, (MemoryError, RuntimeError, OSError)):
        return False
    from popvlm.answer import out_of_memory
    return out_of_memory(error)


def _console() -> Console:
    return Console(highlight=False)


def _print_json(record: Any) -> None:
    typer.echo(json.dumps(record))


def _write(text: str) -> None:
    typer.echo(_printable(text), nl=False)


def _steps(quiet: bool) -> Callable[[str], None]:
    """What tells of a command's steps: nobody sees them where standard error is no terminal."""
    return _ignore if quiet or not sys.stderr.isatty() else _say


def _say(step: str) -> None:
    typer.secho(f"{step} ...", dim=True, err=True)


def _ignore(text: str) -> None:
    pass


def _printable(text: str) -> str:
    """Without control characters, with which a model or a file could steer the terminal."""
    return "".join(character if character.isprintable() or character in "\n\t" else "\ufffd" for character in text)


def _cell(text: str) -> Text:
    return Text(_printable(text)) if text else Text("(nothing)", style="dim")


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s"


def _rate(got: Answer) -> str:
    return "no more" if got.tokens_per_s is None else f"{got.tokens_per_s:.1f} tokens/s"


def _times(full: Answer, pruned: Answer) -> str:
    return f"{full.first_token_s / pruned.first_token_s:.2f}x"


def _pair_record(full: Answer, pruned: Answer) -> dict[str, Any]:
    return {"full": asdict(full), "pruned": asdict(pruned), "same_answer": full.text == pruned.text,
            "first_token_ratio": full.first_token_s / pruned.first_token_s}


def _plan_record(plan: PruningPlan) -> dict[str, Any]:
    return {"num_layers": plan.num_layers, "visual": sorted(plan.visual), "text": sorted(plan.text), "tail": plan.tail,
            "kv": plan.kv, "source": plan.source, "fingerprint": plan.fingerprint and asdict(plan.fingerprint)}


def _in_a_line(plan: PruningPlan) -> str:
    return "plan: " + repr(plan).removeprefix("PruningPlan(").removesuffix(")")
