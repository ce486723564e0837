"""What the lineage knows of how a model was trained: its job, its parents and the chain of its states."""

from __future__ import annotations

import json
from dataclasses import dataclass

from ringmaster.codec import from_json
from ringmaster.errors import InputError, LedgerError, input_errors
from ringmaster.flows.lineage.home import LineageHome
from ringmaster.model_lineage.snapshot import LineageNode
from ringmaster.tasks.recording.model_writer import CHAIN, TRAINING, TrainingInputs
from ringmaster.techniques import Job
from ringmaster.techniques.checkpoints.chain import StateChain, StateLink


@dataclass(frozen=True, kw_only=True)
class RecordedTraining:
    """What the lineage knows of how a model was trained.

    chain: the chain of its states; None for a model that was made without steps.
    """

    node: LineageNode
    record: TrainingInputs
    chain: StateChain | None

    @classmethod
    def of(cls, home: LineageHome, node: LineageNode) -> RecordedTraining:
        """Returns the record of a model. Raises InputError where it cannot be made again from it."""
        if node.record.run_id is None:
            raise InputError([f"{node.label} was not trained here. To fix: name a model that a batch has made"])
        record = from_json(TrainingInputs, json.loads(_recorded(home, node, TRAINING, what="its job")))
        if record.job.is_black_box:
            raise InputError([f"{node.label} was trained by a command of its own, which alone knows what its steps do"])
        if not record.job.trains:
            return cls(node=node, record=record, chain=None)
        text = _recorded(home, node, CHAIN, what="the chain of its states")
        about = f"the chain of the states of {node.label} was changed after it was recorded: "
        with input_errors(ValueError, TypeError, KeyError, AttributeError, about=about):
            return cls(node=node, record=record, chain=StateChain.parse(text))

    @property
    def job(self) -> Job:
        """The job as its states were trained, whatever its record says now."""
        return self.record.job if self.chain is None else from_json(Job, self.chain.job)

    @property
    def links(self) -> tuple[StateLink, ...]:
        """The links of its chain."""
        return () if self.chain is None else self.chain.links


def _recorded(home: LineageHome, node: LineageNode, path: str, *, what: str) -> str:
    with input_errors(LedgerError, about=f"{node.label} was recorded without {what}, by an earlier release: "):
        return home.ledger.read_text(str(node.record.run_id), path)
