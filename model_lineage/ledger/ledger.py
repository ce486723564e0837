"""The ledger: all MLflow records of a batch, behind one class with plain arguments.

    ledger = Ledger("sqlite:////home/me/.ringmaster/mlflow.db")
    batch = ledger.start_batch("tonight", batch="tonight", params={"objective": "makespan"})
    job = ledger.start_job(batch, "llama", params={"optimizer": {"lr": 3e-4}})
    ledger.log_metrics(job, [MetricPoint("loss", 2.5, step=10)])
    model = ledger.record_model("llama", run_id=job, folder=Path("out"), kind="pretrained")
    ledger.finish_run(job)

The implementation is divided into modules: `connection` (the client, created lazily), `database` (the sqlite file),
`faults` (retries and errors), `runs`, `profiles`, `registry` (finding models), `models` (recording them), `families`
(drawing them), `keeping` (their tensors in the store), `links` and `cards` (the content of their pages).
"""

from ringmaster.model_lineage.ledger.keeping import Keeping
from ringmaster.model_lineage.ledger.profiles import Profiles
from ringmaster.model_lineage.pages import links
from ringmaster.model_lineage.records import ModelRecord


class Ledger(Profiles, Keeping):
    """A team's record of batches, jobs, profiles and models, in one MLflow store; several threads may use it.

    tracking_uri: "sqlite:////absolute/path/mlflow.db", "postgresql://...", or an MLflow server's "http(s)://...".
    experiment: the ledger's own experiment. The runs and models of a batch go to the experiment EXPERIMENT/BATCH,
        profiles to EXPERIMENT-profiles.
    artifact_root: the folder for files if a database is used directly (beside a sqlite file by default); a server uses
        its own configured location.

    The constructor opens nothing; the first use or `warm_up()` does. Every failure raises LedgerError with a remedy.
    """

    def ui_links(self, *, run_id: str | None = None, model: ModelRecord | None = None) -> dict[str, str]:
        """Returns the paths in MLflow's UI of the experiment and, where given, of a run and a model.

        The experiment is that of the run, or the ledger's own. The paths start with "#/": prefix them with the UI's
        address, or use them unchanged in the UI's markdown.
        """
        experiment_id = str(self.experiment_id(self.experiment)) if run_id is None else self.experiment_of(run_id)
        paths = {"experiment": links.experiment_path(experiment_id)}
        if run_id is not None:
            paths["run"] = links.run_path(experiment_id, run_id)
        if model is not None and model.version is not None:
            paths["model"] = links.model_version_path(model.registered_name, model.version)
        elif model is not None:
            paths["model"] = links.logged_model_path(str(model.experiment_id), model.model_id)
        return paths
