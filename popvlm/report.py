"""A calibration's report: one HTML page with its plots in it."""

from __future__ import annotations

import base64
from io import BytesIO
from typing import Any

from jinja2 import Template
from matplotlib.figure import Figure

from popvlm.calibrate import Calibration
from popvlm.importance import plot

PAGE = Template("""<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{{ title }}</title>
<style>body{font:16px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:1em 0}td,th{border-bottom:1px solid #ddd;padding:.2em .8em;text-align:right}
td:first-child,th:first-child{text-align:left}tr.best{background:#e8f4e8;font-weight:600}img{max-width:100%}</style>
<h1>{{ title }}</h1>
<p>Budget: {{ record.budget }}. {% if record.met %}The plan meets it:{% else %}<strong>No plan that was tried meets
it.</strong> The nearest:{% endif %} {{ plan }}. {{ source }}.</p>
<h2>What was tried</h2>
<p>Each plan against the full model on {{ record.best.prompts }} held-out prompts. KL is that of the first token, in
nats; the speed-up is what the decoder's arithmetic allows on prompts of the samples' mean length, not a time.</p>
<img alt="speed-up against divergence" src="{{ trials }}">
<table><tr><th>visual skips<th>text skips<th>tail<th>speed-up allowed<th>mean KL<th>95 % KL<th>first token agrees
<th>answer agrees</tr>
{% for row in record.trials|sort(attribute="speedup_limit") %}<tr{% if row == record.best %} class="best"{% endif %}>
<td>{{ row.visual|length }}<td>{{ row.text|length }}<td>{{ row.tail }}<td>{{ "%.2fx"|format(row.speedup_limit) }}
<td>{{ "%.4f"|format(row.mean_kl) }}<td>{{ "%.4f"|format(row.p95_kl) }}<td>{{ "%.1f %%"|format(100 * row.agreement) }}
<td>{{ "%.1f %%"|format(100 * row.answer_agreement) }}</tr>{% endfor %}</table>
{% if importance %}<h2>Which layers matter</h2>
<p>Virtual gates: the mean squared gradient of each layer's gate, summed over the prompt's positions (prefill) and over
the answer's (decode).</p><img alt="importance over depth" src="{{ importance }}">{% endif %}
<h2>What it was calibrated on</h2>
<table><tr><th>kind<th>prompts<th>passed over<th>visual tokens<th>text tokens<th>visual share</tr>
{% for kind, row in record.samples.items() %}<tr><td>{{ kind }}<td>{{ row.prompts }}<td>{{ row.skipped }}
<td>{{ row.visual }}<td>{{ row.text }}<td>{{ "%.0f %%"|format(100 * row.visual_share) }}</tr>{% endfor %}</table>
<p>{{ "%.0f"|format(record.seconds) }} s, popvlm {{ record.popvlm }}.</p></html>
""", autoescape=True)


def html(found: Calibration) -> str:
    """The report as a page that needs no other file."""
    made_for = found.plan.fingerprint
    title = f"popvlm: a plan for {made_for.checkpoint or made_for.family}" if made_for else "popvlm: a plan"
    return PAGE.render(title=title, record=found.record(), plan=repr(found.plan), source=found.plan.source,
                       trials=_embedded(frontier(found)),
                       importance=_embedded(plot(found.profile)) if found.profile else None)


def frontier(found: Calibration) -> Figure:
    """The plans that were tried: mean KL, on a log scale, against the speed-up that each allows."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for tail in sorted({trial.plan.tail for trial in found.choice.trials}):
        some = [trial for trial in found.choice.trials if trial.plan.tail == tail]
        axes.plot([trial.speedup for trial in some], [max(trial.kl, 1e-7) for trial in some], "o", label=f"tail {tail}")
    best = found.choice.best
    axes.plot([best.speedup], [max(best.kl, 1e-7)], "o", ms=14, mfc="none", mec="tab:green", mew=2, label="chosen")
    if found.budget.divergence is not None:
        axes.axhline(found.budget.divergence, color="gray", ls="--", lw=1)
    if found.budget.speedup is not None:
        axes.axvline(found.budget.speedup, color="gray", ls="--", lw=1)
    axes.set_yscale("log")
    axes.set_xlabel("speed-up of the decoder's prefill that the plan allows")
    axes.set_ylabel("KL(full || pruned) of the first token  (nats)")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    return figure


def _embedded(figure: Any) -> str:
    image = BytesIO()
    figure.savefig(image, format="svg")
    return "data:image/svg+xml;base64," + base64.b64encode(image.getvalue()).decode()
