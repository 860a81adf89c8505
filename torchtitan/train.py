"""The trainer's command: settings -> process group -> run -> exit code. Nothing is built here.

Exit codes: 0 done; 2 a setting, file or checkpoint has to be mended, said in one message, or the
device's memory is not enough, said with a plan of the job; 3 the loss or gradient norm was not
finite; 4 stopped early by a signal or the deadline, saved where checkpoints are on; 128 + n a
second signal n; anything else is a fault of ours, with its traceback.
"""

from __future__ import annotations

import gc
import os
import sys

from torchtitan.base.log import begin_process
from torchtitan.base.urls import is_url

if __name__ == "__main__":
    # a launcher has said it already, and of ranks that were started by hand the first one says it
    is_told = "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("RANK", "0") != "0"
    num_ranks = os.environ.get("WORLD_SIZE", "1")
    begin_process(sys.argv[1:], num_ranks=None if is_told else num_ranks, are_here=num_ranks == "1")
    # until `train_and_leave`: imports make half a million objects and no garbage, and to look
    # through them again and again would be a tenth of the time to the first step
    gc.disable()

import logging
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from torchtitan.assemble import assemble
from torchtitan.base.determinism import keep_process_settings
from torchtitan.base.device import device_type
from torchtitan.base.errors import CheckpointError, NonFiniteError, StoppedError, UserError
from torchtitan.base.log import (
    erase_line,
    init_logging,
    is_terminal,
    keep_logging,
    note_in_file,
    shown_ranks,
    use_color,
)
from torchtitan.job import Config, load_job
from torchtitan.mesh.alike import check_alike
from torchtitan.mesh.elastic import started
from torchtitan.mesh.faults import (
    PeerError,
    end_with_launcher,
    exit_code_of,
    refuse_exits,
    refused_exit,
    stacks_of_stalls,
)
from torchtitan.mesh.process_group import (
    Launch,
    await_report,
    await_reports,
    begin_report,
    end_process_group,
    end_report,
    init_process_group,
    is_first_to_report,
    leave,
    read_launch,
    seconds_to_wait,
)
from torchtitan.mesh.recorder import write_collectives
from torchtitan.mesh.stop import StopRequest, begin_together, watch_signals
from torchtitan.metrics.progress import ProgressBar, Summary, show_summary, shows_bar
from torchtitan.metrics.rows import RECORD
from torchtitan.plan.ran_out import find_cause, plan_after, seconds_to_plan
from torchtitan.trainer import Run, Trainer

logger = logging.getLogger("torchtitan.train")  # __name__ is "__main__" when this is started
SECONDS_FOR_RANK_0_TO_SPEAK = 5
SECONDS_TO_FINISH = 10
"""How much longer ranks wait for the planner than it may take: who leaves before it has been ended
and its last words are out has the launcher end the rank that it runs for."""


def train(argv: Sequence[str], *, stop: StopRequest, undo: ExitStack | None = None) -> None:
    """Run the job that the command line describes on this rank, until its end or `stop`.

    The process is left as it was found, after an error too, so that another run may follow: its
    process group, logging, determinism, random generators, environment and the folder's lock. With
    `undo` that is left to the caller. Ranks of one job must call it equally often.

    Raises:
        UserError: Something outside the library has to change, or the run was stopped.
        PeerError: Another rank hangs; a thread may still wait for it in a save.
    """
    if undo is None:
        with ExitStack() as undo:
            return train(argv, stop=stop, undo=undo)
    launch = prepare_process(undo)
    job = load_job(argv)
    _, stopped = train_job(job.config, launch=launch, stop=stop, undo=undo, wording=job.wording())
    if stopped is not None:
        raise StoppedError(stopped)


@refuse_exits()
def train_job(
    config: Config,
    *,
    launch: Launch,
    stop: StopRequest,
    undo: ExitStack,
    wording: AbstractContextManager[None],
    callbacks: Sequence[object] = (),
) -> tuple[Trainer, str | None]:
    """Train in a prepared process, and raise as `train` does; return how it was stopped, if it was.
    `wording` adds to mistakes where the settings were given."""
    stop.end_after(config.checkpoint.save_before_seconds, started=started(os.environ))
    folder = Path(config.job.dump_folder)
    color = use_color(sys.stderr, disabled=config.metrics.disable_color_printing)
    shown = log_to(folder, launch=launch, color=color)
    init_process_group(launch, device_type=device_type(), settings=config.comm, dump_folder=folder)
    undo.callback(end_process_group)  # not before: a group that the process has already is not ours
    began = time.monotonic()
    with wording:
        check_alike(config)
        run = assemble(config, launch=launch, color=color, undo=undo, callbacks=callbacks)
    bar = build_bar(run, show=shows_bar(launch.rank, shown=shown), color=color)
    trainer = Trainer(run, stop=stop, doing=bar.doing)
    undo.callback(trainer.close_after_failure)
    begin_together(stop)
    log, limit = folder / "logs" / f"rank_{launch.rank}.log", config.comm.train_timeout_seconds
    with bar:
        with stacks_of_stalls(log, limit_seconds=limit, on_step=bar.advance) as on_step:
            reason = train_steps(trainer, on_step=on_step)
        with bar.doing("saving"):
            if reason is None and trainer.last_row is None and run.checkpoints is not None:
                run.checkpoints.complete()
            trainer.close()
    if reason is None and (trainer.last_row is None or launch.rank == min(shown)):
        tell_end(trainer, config=config, seconds=time.monotonic() - began, color=color)
    return trainer, reason and describe_stop(trainer, config=config, reason=reason)


def prepare_process(undo: ExitStack) -> Launch:
    """Keep for `undo` what a run changes in this process, and send the log to the console.

    Raises:
        ConfigError: The launcher's environment, or LOG_RANK, makes no sense.
    """
    launch = read_launch(os.environ)
    shown_ranks(os.environ.get("LOG_RANK") or "0", world_size=launch.world_size)
    undo.enter_context(keep_process_settings())
    undo.enter_context(keep_logging())
    # the settings, which name the folder, may give notices already
    log_to(None, launch=launch, color=False)
    return launch


def log_to(folder: Path | None, *, launch: Launch, color: bool) -> frozenset[int]:
    """Send the log to the console and to the run's folder; return the ranks that are shown."""
    spec, world_size = os.environ.get("LOG_RANK"), launch.world_size
    init_logging(rank=launch.rank, world_size=world_size, log_rank=spec, folder=folder, color=color)
    return shown_ranks(spec or "0", world_size=world_size)


def build_bar(run: Run, *, show: bool, color: bool) -> ProgressBar:
    """Build the bar of a run, from where it is to its last step."""
    done, steps = run.progress.step, run.training.steps
    return ProgressBar(done_steps=done, total_steps=steps, show=show, color=color)


def train_steps(trainer: Trainer, *, on_step: Callable[[int], None]) -> str | None:
    """Train, and say all that is known of a fault; return why the run was stopped, if it was.

    Raises:
        NonFiniteError: As `Trainer.train`, with what became of the save in flight.
        PeerError: Another rank hangs, by the save in flight.
    """
    checkpoints = trainer.run.checkpoints
    try:
        return trainer.train(on_step=on_step)
    except NonFiniteError as error:
        try:
            trainer.close()  # all ranks are here: the save in flight is worth waiting for
        except CheckpointError as failed:
            raise NonFiniteError(f"{error}\nThe save in flight failed: {failed}") from failed
        raise
    except RuntimeError as error:  # of a collective, say, which does not know who is missing
        suspicion = "" if checkpoints is None else checkpoints.suspicion()
        if suspicion and not isinstance(error, PeerError):
            raise PeerError(suspicion) from error
        raise


def describe_stop(trainer: Trainer, *, config: Config, reason: str) -> str:
    """Say why and where a run was stopped, and how it goes on."""
    step, steps = trainer.run.progress.step, trainer.run.training.steps
    where = f"stopped after step {step} of {steps} by {reason}"
    if config.checkpoint.enable:
        return f"{where}; it is saved: start the same command again to go on"
    return f"{where}; nothing is saved, since checkpoint.enable is off"


def tell_end(trainer: Trainer, *, config: Config, seconds: float, color: bool) -> None:
    """Say what a finished run comes to, or that there was nothing to train."""
    step, steps = trainer.run.progress.step, trainer.run.training.steps
    if trainer.last_row is not None:
        summary = summarize(trainer, config=config, seconds=seconds)
        show_summary(summary, terminal=is_terminal(sys.stderr), color=color)
    elif steps > 0:
        logger.info(
            "Nothing to train: %s is at step %d of %d already; choose another job.dump_folder, or "
            "go on with --checkpoint.mode continue --training.%s N",
            config.job.dump_folder,
            step,
            steps,
            "num_epochs" if trainer.run.loader.exhausted else "steps",
        )


def summarize(trainer: Trainer, *, config: Config, seconds: float) -> Summary:
    """Return what a finished run comes to, and where its output lies."""
    run, row = trainer.run, trainer.last_row
    folder, metrics = Path(config.job.dump_folder), config.metrics
    places: dict[str, Path | str] = {"metrics": folder / f"{RECORD}.jsonl", "logs": folder / "logs"}
    if config.checkpoint.enable:
        at = config.checkpoint.folder
        places["checkpoints"] = at if is_url(at) else folder / at
    if metrics.enable_tensorboard:
        places["tensorboard"] = folder / metrics.save_tb_folder
    if metrics.enable_wandb:
        places["wandb"] = folder / "wandb"
    return Summary(
        num_steps=run.progress.step,
        num_tokens=run.progress.tokens_seen,
        final_loss=None if row is None else row["loss"],
        validation_loss=None if row is None else row.get("validation_loss"),
        tokens_per_second=run.meter.average_tokens_per_second,
        seconds=seconds,
        places={name: str(path) for name, path in places.items()},
    )


def main(argv: Sequence[str], *, undo: ExitStack | None = None) -> int:
    """Train, and return the exit code; from the main thread, which alone may take signals.

    What the run has made in the process is undone, or that is left to the caller, who gives `undo`.
    """
    if undo is None:
        with ExitStack() as undo:
            return main(argv, undo=undo)
    with watch_signals() as stop:
        try:
            train(argv, stop=stop, undo=undo)
        except UserError as error:
            _report(error)
            return exit_code_of(error, os.environ)
        except KeyboardInterrupt as error:  # of code of the user's own: no signal raises it here
            _report(refused_exit(error))
            return UserError.exit_code
        except (Exception, CheckpointException) as error:  # DCP's is no Exception
            note_in_file(traceback.format_exc())
            write_collectives()
            if (ran_out := find_cause(error)) is None:
                raise
            _report_ran_out(ran_out, argv)
            return UserError.exit_code
    return 0


def train_and_leave(argv: Sequence[str]) -> None:
    """Train, and end this process, after a fault too.

    Nothing is joined and nothing undone: the interpreter's own end would wait for threads, and
    groups that are taken down for what is in flight in them, maybe with a peer that hangs.
    """
    gc.freeze()  # what is imported stays: no later collection looks at it
    gc.enable()
    undo = ExitStack()
    if started(os.environ) is not None:
        end_with_launcher()
    try:
        exit_code = main(argv, undo=undo)
    except (Exception, CheckpointException) as error:
        traceback.print_exc()
        leave(exit_code_of(error, os.environ))
        raise  # never comes to this
    leave(exit_code)


def _report(error: UserError) -> None:
    """Say what is wrong once a job, though every rank may have met the same mistake."""
    note_in_file(str(error))
    if dist.is_initialized():
        if is_first_to_report():
            _say(error)
        await_reports()
        _await_plan()
        return
    if os.environ.get("RANK", "0") != "0":
        # the launcher ends all ranks when one ends: only a mistake that rank 0 has not met is said
        time.sleep(SECONDS_FOR_RANK_0_TO_SPEAK)
    _say(error)


def _report_ran_out(error: torch.OutOfMemoryError, argv: Sequence[str]) -> None:
    """Say once a job where memory went, and what to do; the other ranks wait for it."""
    if dist.is_initialized() and not begin_report():
        _await_plan()
        return
    try:
        _say(f"rank {os.environ.get('RANK', '0')} has run out of its device's memory: {error}")
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        for part in plan_after(argv, world_size=world_size, seconds=_seconds_to_plan()):
            note_in_file(part)
            _say(part)
    finally:
        if dist.is_initialized():
            end_report()


def _await_plan() -> None:
    """Wait until the rank that is out of memory, if one is, has said all."""
    await_report(_seconds_to_plan() + SECONDS_TO_FINISH)


def _seconds_to_plan() -> float:
    """Return how long the planner may take while other ranks, if there are any, wait."""
    is_alone = not dist.is_initialized() or dist.get_world_size() == 1
    return seconds_to_plan(None if is_alone else seconds_to_wait())


def _say(what: object) -> None:
    with suppress(BrokenPipeError):  # as of `| head`: the exit code still tells, and the log file
        sys.stderr.write(f"{erase_line(sys.stderr)}{what}\n")
        sys.stderr.flush()


if __name__ == "__main__":
    train_and_leave(sys.argv[1:])
