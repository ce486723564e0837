"""The jobs that have trained a shared component, on the pages of their models."""

from collections.abc import Iterator, Mapping

from ringmaster.features.composition.job import components_of
from ringmaster.tasks.recording.record_hooks import RecordHook
from ringmaster.tasks.storage.journal import JobRecord
from ringmaster.techniques import Job
from ringmaster.text import code_span, markdown


class SharedComponentReport(RecordHook):
    """Says by which rule, and with which jobs, a model was trained."""

    def paragraphs(self, job: Job, record: JobRecord) -> Iterator[str]:
        """Yields the jobs, the places of the component in their models, and the factors of their losses."""
        how = None if job.adaptation is None else job.adaptation.composition
        if how is None:
            return
        jobs = (
            f"{markdown(name)} ({code_span(path)}, loss times {weight:g})"
            for name, path, weight in zip(how.jobs, how.paths, how.weights, strict=True)
        )
        yield f"{markdown(how.component)} was trained by {', '.join(jobs)} together, update rule {how.update}."


class ComponentReport(RecordHook):
    """Names the components of a model."""

    def components(self, job: Job) -> Mapping[str, str]:
        """Returns those that the job names."""
        return components_of(job)


RECORD_HOOKS = (SharedComponentReport(), ComponentReport())
