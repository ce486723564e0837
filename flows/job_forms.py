"""What is done with the jobs of a batch that runs, as sections of a form in Prefect's UI.

The module `forms` of a feature lists further sections in `JOB_FORMS`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.json_schema import SkipJsonSchema

from ringmaster.features import listed
from ringmaster.flows.form_fields import FormSection
from ringmaster.flows.pool.batch_requests import ControllerAnswer, ask_about
from ringmaster.tasks.control.requests import MAX_PRIORITY, RequestKind
from ringmaster.tasks.storage.database import Database

WHICH = "Their names. If the list is empty, this is every job of the batch."


# A number that may stay empty. With None in its schema, the form would have two buttons for it.
OptionalCount = Annotated[int, Field(ge=1)] | SkipJsonSchema[None]
OptionalAmount = Annotated[float, Field(gt=0)] | SkipJsonSchema[None]
OptionalPriority = Annotated[float, Field(gt=0, le=MAX_PRIORITY)] | SkipJsonSchema[None]


def optional(title: str, description: str) -> Any:
    """Returns the field of a number that may stay empty: Prefect would fill in None if that was a default."""

    def drop_default(schema: dict[str, Any]) -> None:
        schema.pop("default", None)

    return Field(default=None, title=title, description=description, json_schema_extra=drop_default)


class JobForm(FormSection):
    """A request about jobs of a batch. Links with some of its fields filled in open the form."""

    @classmethod
    def links(cls, jobs: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
        """Returns the fields to fill in for a job, or for all jobs ([]), by the text of the link; "" for no link."""
        raise NotImplementedError

    def request(
        self, database: Database, batch: str, *, say: Callable[[str], object] = lambda text: None
    ) -> Sequence[ControllerAnswer]:
        """Makes the request; returns the answers of what executes the batch. Raises InputError where it refuses.

        say: logs what precedes the request, such as its price.
        """
        raise NotImplementedError


class SetAction(JobForm, title="Change settings"):
    """Change settings of jobs that run or wait."""

    jobs: list[str] = Field(default=[], title="Jobs", description=WHICH)
    steps: OptionalCount = optional("Steps", "The number of steps of each job. What is empty stays as it is.")
    weight: OptionalAmount = optional("Weight", "Of the end of each job in the plan.")
    deadline: OptionalAmount = optional("Deadline (seconds)", "From the start of the batch.")
    priority: OptionalPriority = optional("Priority", "1 is usual; with 2, an end counts twice.")

    @classmethod
    def links(cls, jobs: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
        """Returns the names of the jobs."""
        return {"change settings": {"jobs": list(jobs)}}

    def request(
        self, database: Database, batch: str, *, say: Callable[[str], object] = lambda text: None
    ) -> Sequence[ControllerAnswer]:
        """Requests what is not empty."""
        settings = self.model_dump(exclude_none=True, exclude={"jobs"})
        return ask_about(database, RequestKind.SET, batch=batch, jobs=self.jobs, settings=settings)


class StateAction(JobForm, title="Pause, resume or cancel"):
    """Pause, resume or cancel jobs; those that run write a checkpoint first."""

    action: Literal["pause", "resume", "cancel"] = Field(
        default="pause", title="Action", description="Jobs that run write a checkpoint first. A cancelled job ends."
    )
    jobs: list[str] = Field(default=[], title="Jobs", description=WHICH)

    @classmethod
    def links(cls, jobs: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
        """Returns each action with the names of the jobs."""
        return {action: {"action": action, "jobs": list(jobs)} for action in ("pause", "resume", "cancel")}

    def request(
        self, database: Database, batch: str, *, say: Callable[[str], object] = lambda text: None
    ) -> Sequence[ControllerAnswer]:
        """Requests the action."""
        return ask_about(database, RequestKind(self.action), batch=batch, jobs=self.jobs)


def job_forms() -> tuple[type[JobForm], ...]:
    """Returns all sections; those of features first.

    A form that is opened with values shows the section that has most of them, and of equal ones the first.
    """
    return (*listed("forms", "JOB_FORMS"), SetAction, StateAction)
