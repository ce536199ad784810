"""A document as one self-contained HTML page."""

import base64
import re
from collections import Counter
from importlib.resources import files

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from steerlab.experiment._blocks import Document


def html_page(document: Document) -> str:
    """A document as a page that needs nothing else: no other file, no script, no network."""
    template = (files("steerlab.experiment._report") / "report.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"data_uri": data_uri, "trusted": Markup, "kind": lambda block: type(block).__name__}
    return environment.from_string(template).render(document=document, ids=identifiers(document))


def data_uri(svg: bytes) -> str:
    """A picture inside a page."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()


def identifiers(document: Document) -> list[str]:
    """An identifier per section, from its title, none twice."""
    found: list[str] = []
    counts: Counter[str] = Counter()
    for section in document.sections:
        slug = re.sub(r"[^a-z0-9]+", "-", section.title.lower()).strip("-") or "section"
        counts[slug] += 1
        found.append(f"{slug}--{counts[slug]}" if counts[slug] > 1 else slug)
    return found
