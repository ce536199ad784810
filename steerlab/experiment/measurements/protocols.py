"""Published protocols in a run: their table, what is the same as published and what differs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from steerlab.display import Facts, Piece, Remarks, Shown, count
from steerlab.experiment._blocks import Block, Bullets, Folded, Paragraph, Section, Subsection
from steerlab.experiment._blocks import Facts as FactsBlock
from steerlab.experiment._blocks.material import Material
from steerlab.experiment._blocks.tables import table_of
from steerlab.experiment._store.results import finding_kind
from steerlab.experiment.measurements._measurement import Measurement


@dataclass(frozen=True, repr=False)
class ProtocolResult(Shown):
    """What a published protocol found on one model.

    Attributes:
        protocol: its name, e.g. `steerability`.
        paper: authors, year and title.
        table: in the shape of the paper's.
        rows: what the table is made of, e.g. a row per item.
        same: what was done as published.
        differs: what was not.
        settings: arguments, and hashes of the data.
        sentences: what was found.
    """

    protocol: str
    paper: str
    table: pd.DataFrame = field(repr=False)
    rows: pd.DataFrame = field(repr=False)
    same: tuple[str, ...]
    differs: tuple[str, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    sentences: tuple[str, ...] = ()

    def _finding(self) -> str:
        return f"{self.protocol!r}, a table of {count(len(self.table), 'row')} from {count(len(self.rows), 'row')}"

    def _pieces(self) -> Sequence[Piece]:
        from steerlab.experiment._blocks.faces import frame_piece  # which draws

        about = [("paper", self.paper), *[(name, str(value)) for name, value in self.settings.items()]]
        return [
            Remarks(self.sentences),
            frame_piece(self.table, "as in the paper", fold=False),
            frame_piece(self.rows, "what it is made of"),
            Remarks([f"As published: {one}" for one in self.same]),
            Remarks([f"Different: {one}" for one in self.differs]),
            Facts(about),
        ]

    def __str__(self) -> str:
        table = self.table.to_string(index=False, float_format=lambda value: f"{value:.3f}")
        return "\n".join([f"{self.protocol} ({self.paper})", table, *self.sentences])


def _blocks(found: ProtocolResult, place: str) -> list[Block]:
    return [
        Paragraph(f"{found.paper}."),
        *[Paragraph(sentence) for sentence in found.sentences],
        table_of(found.table, "In the paper's shape"),
        Subsection("As published", [Bullets(found.same)]),
        Subsection("Different from what was published", [Bullets(found.differs)]),
        FactsBlock([(name, str(value)) for name, value in found.settings.items()]),
        Folded("What the table is made of", [table_of(found.rows, "Rows", place=f"{place}/rows.parquet")]),
    ]


def _sections(m: Material) -> list[Section]:
    found = enumerate(m.of("protocols"))
    return [Section(f"Protocol: {one.protocol}", _blocks(one, f"findings/protocol-{k:03d}")) for k, one in found]


PROTOCOL = Measurement(finding_kind("protocol", "protocols", ProtocolResult), _sections)
