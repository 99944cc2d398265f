"""The end of a run: measure what was trained, and write the checkpoints."""

from dataclasses import asdict, replace
from pathlib import Path

from medusa.loading import load_backbone
from medusa.model import MedusaModel

from .adapt import adapt_backbone, learning_parameters
from .config_file import as_dict
from .hidden_states import LiveHiddenStates
from .metrics import measure
from .plot import plot_accuracy
from .provenance import provenance
from .run import Run, Stage, load_backbone_parameters
from .run_state import BEST, load_newest_state
from .sharding import whole
from .tracking import Tracker


def put_together(run: Run, stage: Stage) -> None:
    """Replace a model that is split over the ranks by a whole one, on the main process."""
    heads = {name: whole(tensor) for name, tensor in run.model.heads.state_dict().items()}
    learned = {name: whole(parameter) for name, parameter in stage.backbone.items()}
    if not run.accelerator.is_main_process:
        return
    section = run.config.backbone
    backbone = load_backbone(section.path, section.dtype, {"": run.accelerator.device}, section.quantization)
    run.model = MedusaModel.attach(backbone, run.model.config)
    run.model.heads.float()
    run.model.heads.load_state_dict(heads)
    run.adapter = adapt_backbone(run.model, run.config.joint)
    stage.backbone = learning_parameters(run.model.model)
    load_backbone_parameters(stage, {"backbone": learned})
    if run.held_out is not None:
        run.held_out = replace(run.held_out, states=LiveHiddenStates(run.model.backbone))
    run.model.eval()


def finish(run: Run, stage: Stage, directory: Path, tracker: Tracker) -> None:
    """Measure what was trained, and save it in the backbone's dtype: the last heads, and the best where others are."""
    drift = None if stage.original is None else stage.original.drift(run.model.backbone)
    if drift is not None:
        tracker.log(stage.last_step, {f"drift/{name}": value for name, value in asdict(drift).items()})
    measured = None if run.held_out is None else measure(run.model, run.held_out)
    write_checkpoint(run, directory / "final")
    if drift is not None:
        drift.save(directory / "final")
    if measured is not None:
        found = measured.accuracy
        found.save(directory / "final")
        tracker.log(stage.last_step, measured.metrics())
        columns = ["head", "top-1", "top-5", "top-10", "positions"]
        tracker.show(stage.last_step, columns, found.table(), plot_accuracy(found, directory / "final"))
    if measured is not None and stage.best > measured.best:
        best = load_newest_state(directory / "states", BEST)
        assert best is not None, "the best state is written when it is found"
        run.model.heads.load_state_dict(best["heads"])
        load_backbone_parameters(stage, best)
        write_checkpoint(run, directory / "best")
        run.accelerator.print(f"better on {run.config.data.eval}: step {best['step']}, in {directory / 'best'}")
    tracker.close()


def write_checkpoint(run: Run, directory: Path) -> None:
    """Write the model as it is now; its trained weights are in the backbone's dtype from then on."""
    whole = run.config.joint.method in ("full", "last_layers")
    (run.model if whole else run.model.heads).to(run.dtype)
    facts = provenance(run.config.optimization.seed) | {"config": as_dict(run.config)}
    run.model.save_pretrained(directory, run.tokenizer, facts, run.adapter, with_backbone=whole)
