"""What the built-in mix writes: names, sentences, questions, and the prompts that have no image."""

from __future__ import annotations

import importlib
import inspect
import random
from functools import cache
from pydoc_data.topics import topics

NAMES = ("Ana Silva", "Ben Okafor", "Chen Wei", "Dora Weiss", "Emil Novak", "Fatima Haddad", "Grace Kim",
         "Hugo Martin", "Jonas Berg", "Kavya Rao", "Liam Doyle", "Mei Tanaka", "Nadia Petrova", "Omar Aziz")
FIRMS = ("Northwind Traders", "Harbour & Sons", "Alpine Paper Ltd", "Blue Ridge Foods", "Kestrel Logistics",
         "Lumen Labs", "Oak Street Clinic", "Pioneer Tools", "Sunfield Energy", "Vector Print")
PLACES = ("Lisbon", "Osaka", "Nairobi", "Toronto", "Leipzig", "Porto Alegre", "Cork", "Pune", "Oslo", "Denver", "Lyon")
GOODS = ("copper wire", "desk lamps", "green tea", "hex bolts", "ink cartridges", "oat milk", "paper rolls",
         "rain jackets", "solar panels", "steel pipes", "tile adhesive", "winter tyres")
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
FIELDS = ("Full name", "Date of birth", "Address", "City", "Phone", "E-mail", "Employer", "Policy number", "Account",
          "Emergency contact", "Reason for visit", "Amount requested")
MENU = "File", "Edit", "View", "Insert", "Format", "Tools", "Window", "Help"
ACTIONS = "Save", "Cancel", "Delete", "Export", "Share", "Retry", "Continue", "Log out", "Apply", "Upgrade", "Send"
MODULES = ("argparse", "ast", "calendar", "csv", "difflib", "fractions", "heapq", "inspect", "json.decoder", "random",
           "shlex", "statistics", "textwrap", "timeit")

WHO = ("the committee", "our supplier", "the northern office", "a visitor", "the second shift", "the patient",
       "the survey team", "every subscriber", "the museum", "the pilot plant", "the tenant", "the ministry")
DID = ("approved", "postponed", "has not yet answered", "measured", "paid for", "questioned", "rewrote",
       "lost track of", "expects", "will review", "could not explain", "praised")
WHAT = ("the revised budget", "two of the deliveries", "the results of the first trial", "a leaking valve",
        "the new opening hours", "the letter of 14 May", "an unusual rise in demand", "the safety rules",
        "the shorter route", "about a third of the claims", "the old photographs", "the terms of the lease")
WHY = ("because the figures did not add up", "after a long discussion", "in spite of the weather", "until Monday",
       "as the table above shows", "which nobody had expected", "although costs went up by 7 %", "for the third time",
       "so that work could go on", "without giving a reason", "while prices were still low", "at the board's request")
FOREIGN = ("Der Zug nach Leipzig hat heute zwanzig Minuten Verspätung.", "La réunion est reportée à jeudi prochain.",
           "¿Cuánto cuesta enviar este paquete a Chile?", "La biblioteca chiude alle sei durante l'estate.",
           "O museu fica aberto até às oito da noite.", "会议改到星期四下午三点。",
           "この駅から空港まで電車で四十分かかります。",
           "Сегодня в городе ожидается сильный дождь.", "اجتماع الغد سيبدأ في الساعة التاسعة.",
           "कृपया दरवाज़ा धीरे से बंद करें।")

QUESTIONS = {
    "document": ("Summarise this page.", "What is the total?", "Who is this for?", "What is the date?", "Is it signed?",
                 "What is the phone number?", "Give every field and its value as JSON."),
    "dense text": ("Summarise this page.", "Transcribe the text.", "What does the second paragraph say?",
                   "Find the sentence that states an exception, quote it, and say in your own words what it excepts."),
    "table": ("Which row has the highest value?", "How many rows are there?", "Add up the last column.",
              "Convert this table to Markdown."),
    "chart": ("Which month was highest?", "Which is the smallest?", "Describe the trend.", "What does the legend say?",
              "Give the approximate value of each, then say by how much the largest exceeds the smallest."),
    "screenshot": ("What does the red button say?", "What should I click to go on?", "Which options are switched on?",
                   "What does this code do?", "Give the coordinates of the button that cancels."),
    "scene": ("Describe the picture.", "How many objects are there?", "Where does the light come from?",
              "Which colours dominate?", "Write a caption for this photo.", "What could have happened just before?"),
    "several images": ("What is the difference?", "Which one is the odd one out?", "Compare them.",
                       "Describe each image in one sentence.", "Which of these has the most text?")}
MANNERS = ("Answer in a single word or phrase.", "Think step by step, then give the answer on the last line.",
           "Reply with JSON only.", "Be brief.", "If the image does not say, answer \"unanswerable\" and explain why.",
           "Explain it to somebody who cannot see it: begin with the layout, then go from top to bottom, and quote "
           "every word that is written.")
FOLLOW_UPS = ("Are you sure?", "And the one next to it?", "Shorter, please.", "How did you find that?", "Why?",
              "Now say it in French.", "What would change if the largest value were left out?")


def sentence(rng: random.Random) -> str:
    said = f"{rng.choice(WHO)} {rng.choice(DID)} {rng.choice(WHAT)}"
    said += rng.choice((f" {rng.choice(WHY)}", f" in {rng.choice(PLACES)}", f", says {rng.choice(NAMES)}", ""))
    return said[0].upper() + said[1:] + "."


def paragraph(rng: random.Random) -> str:
    return " ".join(sentence(rng) for _ in range(rng.randint(2, 7)))


def amount(rng: random.Random) -> str:
    return f"{rng.lognormvariate(5, 1.6):,.2f}"


@cache
def passages() -> tuple[str, ...]:
    """Paragraphs of prose that people wrote: those of Python's reference, which is in every Python's library."""
    found = (" ".join(part.split()) for name in sorted(topics) for part in topics[name].split("\n\n"))
    return tuple(part for part in found if len(part) > 200 and part[0].isupper() and part.isascii()
                 and part.count("__") < 5 and "::" not in part)


def source(rng: random.Random, lines: int) -> list[str]:
    """Lines of code that people wrote: of Python's library, from a definition on."""
    found = _lines(rng.choice(MODULES))
    starts = [at for at, line in enumerate(found[:-lines]) if line.lstrip().startswith(("def ", "class "))]
    start = rng.choice(starts or [0])
    return found[start:start + lines]


@cache
def _lines(module: str) -> list[str]:
    return inspect.getsource(importlib.import_module(module)).splitlines()


def about(rng: random.Random, kind: str) -> list[str]:
    """A question about images of a kind; in a quarter of cases an answer to it and a further question."""
    asked = rng.choice(QUESTIONS[kind]) + (f" {rng.choice(MANNERS)}" if rng.random() < 0.3 else "")
    return [asked] if rng.random() < 0.75 else [asked, paragraph(rng), rng.choice(FOLLOW_UPS)]


def text(rng: random.Random) -> list[str]:
    """The turns of a chat without an image, the user's first and last."""
    prose = "\n\n".join(rng.sample(passages(), rng.choice((1, 2, 3, 6))))
    who, firm, goods = rng.choice(NAMES), rng.choice(FIRMS), rng.sample(GOODS, rng.randint(2, 6))
    stock = "\n".join(f"- {rng.randint(2, 60)} {thing}, {amount(rng)} each" for thing in goods)
    asked = rng.choice((
        f"Summarise the following text in two sentences.\n\n{prose}",
        f"{prose}\n\nUsing only the text above, what would a beginner get wrong first?",
        f"Translate into English, sentence by sentence:\n\n{' '.join(rng.sample(FOREIGN, rng.randint(2, 7)))}",
        f"{who} at {firm} ordered:\n{stock}\nA tenth of the {goods[0]} came back. What is left to pay? Show the steps.",
        f"Write a polite e-mail to {who} of {firm} in {rng.choice(PLACES)}. Facts to use: {paragraph(rng)}",
        f"Turn this into a list of actions, with an owner for each.\n\n{paragraph(rng)}\n\n{paragraph(rng)}",
        f"What are three things to see in {rng.choice(PLACES)}?"))
    turns = [asked]
    for _ in range(rng.choice((0, 0, 0, 1, 3))):
        turns += [paragraph(rng), rng.choice((*FOLLOW_UPS, sentence(rng)))]
    return turns


def code(rng: random.Random) -> list[str]:
    """One question about code."""
    asked = rng.choice(("What does this code do?", "Write tests for this.", "Find the bug, if there is one.",
                        "Rewrite this more clearly and explain each change.", "Add type hints and a docstring."))
    block = "\n".join(source(rng, rng.choice((12, 30, 80))))
    return [f"{asked}\n\n```python\n{block}\n```"]
