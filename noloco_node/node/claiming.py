"""The run folder of a node: whether it may be used for a run, taken for it, and what is said of its checkpoints."""

from __future__ import annotations

from noloco_node.config.data_spec import NOT_READ
from noloco_node.config.files import home_place
from noloco_node.config.node_settings import NodeSettings
from noloco_node.config.run_spec import RunSpec
from noloco_node.errors import ExitCode, UserError
from noloco_node.storage.checkpoint import Checkpoint, CheckpointFolder
from noloco_node.storage.run_folder import RunFolder
from noloco_node.telemetry.events import Warned


def check_folder(folder: RunFolder, spec: RunSpec, settings: NodeSettings) -> None:
    """Raise UserError (RUN_FOLDER) as `open_run` says. Writes nothing."""
    if folder.judge(spec.run_id, spec.name) and not settings.initial_peers:
        raise UserError(
            ExitCode.RUN_FOLDER,
            f"run '{spec.name}' ({spec.run_id}) has come to its end in '{folder.path}': {_whose_weights(spec)} "
            f"in {folder.final}",
            "name another folder with --run-folder to train it anew",
        )


def kept_birth(folder: RunFolder, run_id: str, run_name: str) -> str | None:
    """The life of the run whose state lies in this folder; None if there is no state, or an older release wrote it. It
    is that of the newest checkpoint, else that of the folder if the run has come to its end in it. Raises UserError
    (RUN_FOLDER) if the folder belongs to another run."""
    ended = folder.judge(run_id, run_name)
    checkpoints = CheckpointFolder(folder.checkpoints, keep=1)
    saved = checkpoints.birth(run_id)
    return saved or (folder.birth(run_id) if ended or checkpoints.holds_any else None)


def _whose_weights(spec: RunSpec) -> str:
    if spec.stages == 1:
        return "its weights are"
    return f"the weights of this node's stage, one of {spec.stages}, which only together are the model, are"


def open_run(
    folder: RunFolder, checkpoints: CheckpointFolder, spec: RunSpec, settings: NodeSettings, birth: str
) -> Checkpoint | None:
    """Take the folder for this life of the run (`birth`); returns its newest checkpoint that can be continued. Raises
    UserError (RUN_FOLDER) if it holds another run. It does so too if the run has come to its end there and no peer to
    go on with is named."""
    check_folder(folder, spec, settings)
    folder.claim(spec.run_id, spec.name)
    folder.keep_birth(spec.run_id, spec.name, birth)
    folder.keep_spec(spec.agreed_json)
    if spec.data.own_tokenizer and spec.data.tokenizer != NOT_READ:
        folder.keep_tokenizer_place(home_place(spec.data.tokenizer).absolute())
    return checkpoints.newest(spec.run_id, None if settings.stage == "auto" else settings.stage)


def unusable_checkpoints(checkpoints: CheckpointFolder) -> Warned | None:
    """What to say where the last search of the folder found checkpoints and none that can be used."""
    if not checkpoints.damaged:
        return None
    newest, reason = next(iter(checkpoints.damaged.items()))
    count = len(checkpoints.damaged)
    found = (
        f"THE ONLY CHECKPOINT HERE IS DAMAGED ({newest}"
        if count == 1
        else f"ALL {count} CHECKPOINTS ARE DAMAGED ({newest}"
    )
    return Warned(
        what="checkpoints_unusable",
        detail=f"{found}: {reason}). This node takes the state of another replica of its stage; where there is none, "
        "the stage begins again from the first weights, and what it had learnt is lost. If you have a copy of "
        f"{checkpoints.path}, stop now (Ctrl-C), put it back, and start again",
    )
