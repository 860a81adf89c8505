"""The trainer's command: settings -> process group -> run -> exit code.

Exit codes: 0 done; 2 a setting, file or checkpoint must be fixed, or the device is out of memory;
3 the loss or gradient norm is not finite; 4 stopped early by a signal, the deadline or a callback
(saved if checkpoints are on), or a rank waited too long; 128 + n a second signal n; 1 a traceback.
"""

from __future__ import annotations

import gc
import json
import os
import shlex
import signal
import sys

if __name__ == "__main__":
    from torchtitan.base.path import drop_current_folder

    drop_current_folder()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends the import without a traceback
    # until `main_and_exit`: imports create half a million objects and no garbage
    gc.disable()
    # keeps a GPU's memory in one piece; plans count on it. torch may read it when it is imported
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import logging
import time
import traceback
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from datetime import timedelta
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from torchtitan.base.determinism import keep_process_settings
from torchtitan.base.device import device_type
from torchtitan.base.errors import CheckpointError, NonFiniteError, StoppedError, UserError
from torchtitan.base.files import refuse_links
from torchtitan.base.log import (
    erase_line,
    init_logging,
    keep_logging,
    note_in_file,
    replace_closed_streams,
    shown_ranks,
    use_color,
)
from torchtitan.base.urls import is_url
from torchtitan.build import build_run
from torchtitan.job import Config, load_job, written_names
from torchtitan.mesh.faults import (
    dump_stacks_on_stall,
    exit_code_of,
    is_communication_error,
    refuse_exits,
    refused_exit,
    write_collectives,
)
from torchtitan.mesh.ranks import (
    END_FILE,
    RUN_FILE,
    RankInfo,
    check_alike,
    end_process_group,
    init_process_group,
    leave,
    let_rank_0_report,
    read_rank_info,
)
from torchtitan.mesh.stop import (
    StopRequest,
    end_with_launcher,
    launcher_started,
    sync_before_training,
    watch_signals,
)
from torchtitan.metrics.console import ProgressBar, log_summary, shows_bar
from torchtitan.metrics.rows import RECORD
from torchtitan.trainer import Trainer

logger = logging.getLogger("torchtitan.train")  # __name__ is "__main__" when this is started


@refuse_exits()
def train_job(
    config: Config,
    *,
    launch: RankInfo,
    stop: StopRequest,
    cleanup: ExitStack,
    wording: AbstractContextManager[None],
    callbacks: Sequence[object] = (),
) -> tuple[Trainer, str | None]:
    """Train in a prepared process.

    `wording` adds to a mistake where its setting was given; `callbacks` are those beside the
    settings'.

    Returns:
        The trainer, and why and where it was stopped (None if it finished).
    """
    end_with_launcher(os.environ)
    stop.data_timeout_seconds = config.comm.init_timeout_seconds
    stop.end_after(config.job.time_limit_seconds, started=launcher_started(os.environ))
    folder = Path(config.job.dump_folder)
    color = use_color(sys.stderr, disabled=config.metrics.disable_color_printing)
    refuse_links(folder, [*written_names(config), f"logs/rank_{launch.rank}.log"])
    console_ranks = log_to(folder, launch=launch, color=color)
    run_file = os.environ.get(RUN_FILE)
    if launch.local_rank == 0 and run_file:
        prefix = folder / config.comm.save_traces_folder / config.comm.save_traces_file_prefix
        Path(run_file).write_text(json.dumps({"folder": str(folder), "prefix": str(prefix)}))
        Path(run_file).with_name(END_FILE).unlink(missing_ok=True)  # of a run before this one
        cleanup.callback(Path(run_file).with_name(END_FILE).touch)  # of a script that goes on
    note_in_file(f"rank {launch.rank} on {os.uname().nodename}, process {os.getpid()}", "INFO")
    init_process_group(launch, device_type=device_type(), settings=config.comm, dump_folder=folder)
    cleanup.callback(end_process_group)  # only a group that this call created
    began = time.monotonic()
    with wording:
        check_alike(config)
        run = build_run(config, launch=launch, color=color, cleanup=cleanup, callbacks=callbacks)
    done, steps, show = (
        run.progress.step,
        run.training.steps,
        shows_bar(launch.rank, console_ranks=console_ranks),
    )
    bar = ProgressBar(done_steps=done, total_steps=steps, show=show, color=color)
    trainer = Trainer(run, stop=stop, status=bar.status)
    cleanup.callback(trainer.close_after_failure)
    sync_before_training(stop)
    if done < steps:
        why = f": {config.compile.backend} compiles" if config.compile.enable else ""
        logger.info("Starting at step %d of %d; the first is the slowest%s", done + 1, steps, why)
    log, limit = folder / "logs" / f"rank_{launch.rank}.log", config.comm.train_timeout_seconds
    with bar:
        with dump_stacks_on_stall(log, limit_seconds=limit, on_step=bar.advance) as on_step:
            try:
                reason = trainer.train(on_step=on_step)
            except (NonFiniteError, StoppedError) as error:
                try:
                    trainer.close()  # all ranks are here, so a save in flight can complete
                except CheckpointError as failed:
                    raise type(error)(f"{error}\nThe save in flight failed: {failed}") from failed
                raise
        with bar.status("saving"):
            trainer.close()
    stop.finish()
    if launch.local_rank == 0 and run_file:
        Path(run_file).with_name(END_FILE).write_text("ended")
    if reason is not None:
        where = f"stopped after step {run.progress.step} of {steps} by {reason}"
        if config.checkpoint.enable:
            return trainer, f"{where}; checkpoint saved, run the same command to resume"
        return trainer, f"{where}; no checkpoint saved, because checkpoint.enable is off"
    if trainer.last_row is None and steps > 0:
        key, path = "num_epochs" if run.loader.exhausted else "steps", shlex.quote(str(folder))
        logger.info(
            f"Nothing to train: {folder} is at step {run.progress.step} of {steps} already; choose "
            f"another job.dump_folder, or continue it with --checkpoint.mode continue "
            f"--training.{key} N; to write its weights: torchtitan convert to-hf {path} OUT"
        )
    elif launch.rank == min(console_ranks) and steps > 0:
        log_summary(summarize(trainer, config=config, seconds=time.monotonic() - began))
    return trainer, None


def prepare_process(cleanup: ExitStack) -> RankInfo:
    """Register in `cleanup` the process settings that a run changes, and log to the console; raise
    ConfigError if the launcher's environment or LOG_RANK is invalid."""
    launch = read_rank_info(os.environ)
    cleanup.enter_context(keep_process_settings())
    cleanup.enter_context(keep_logging())
    # reading the settings, which name the folder, may log already
    log_to(None, launch=launch, color=False)
    return launch


def log_to(folder: Path | None, *, launch: RankInfo, color: bool) -> frozenset[int]:
    """Log to the console and to `folder`; return the ranks shown on the console."""
    spec, world_size = os.environ.get("LOG_RANK"), launch.world_size
    init_logging(rank=launch.rank, world_size=world_size, log_rank=spec, folder=folder, color=color)
    return shown_ranks(spec or "0", world_size=world_size)


def summarize(trainer: Trainer, *, config: Config, seconds: float) -> dict[str, str]:
    """Return the results of a finished run and the locations of its output.

    Steps and tokens count all starts of the run, speed and time only the last one.
    """
    run, row, metrics = trainer.run, trainer.last_row or {}, config.metrics
    folder, store = run.folder, config.checkpoint.folder
    losses = {name: row.get(name.replace(" ", "_")) for name in ("loss", "validation loss")}
    paths = {
        "metrics": folder / f"{RECORD}.jsonl",
        "logs": folder / "logs",
        "checkpoints": config.checkpoint.enable and (store if is_url(store) else folder / store),
        "tensorboard": metrics.enable_tensorboard and folder / metrics.save_tb_folder,
        "wandb": metrics.enable_wandb and folder / "wandb",
    }
    return {
        "steps": f"{run.progress.step:,}",
        "tokens": f"{run.progress.tokens_seen:,}",
        **{f"final {name}": f"{loss:.5f}" for name, loss in losses.items() if loss is not None},
        "tokens/s": f"{run.meter.average_tokens_per_second:,.0f}",
        "time": str(timedelta(seconds=round(seconds))),
        **{name: str(path) for name, path in paths.items() if path},
    }


def main(argv: Sequence[str], *, cleanup: ExitStack) -> int:
    """Train the job of the command line and return the exit code.

    Call it from the main thread, which receives signals. `cleanup` receives callbacks that restore
    the process.
    """
    with watch_signals() as stop:
        try:
            launch = prepare_process(cleanup)
            job = load_job(argv)
            _, stopped = train_job(
                job.config, launch=launch, stop=stop, cleanup=cleanup, wording=job.wording()
            )
            if stopped is not None:
                raise StoppedError(stopped)
            if launch.local_rank == 0 and (run_file := os.environ.get(RUN_FILE)):
                Path(run_file).with_name(END_FILE).write_text("finished")
        except UserError as error:
            _report(error)
            return error.exit_code
        except KeyboardInterrupt as error:  # from custom code; signals do not raise it here
            _report(refused_exit(error))
            return UserError.exit_code
        except (Exception, CheckpointException) as error:  # DCP's is no Exception
            if (mistake := _find_mistake(error)) is not None:
                _report(mistake)
                return mistake.exit_code
            note_in_file(traceback.format_exc())
            with suppress(OSError, RuntimeError):  # this error matters more
                write_collectives()
            from torchtitan.base.device import describe_out_of_memory, find_out_of_memory

            if (ran_out := find_out_of_memory(error)) is None:
                raise
            _report(UserError(describe_out_of_memory(ran_out, argv, environ=os.environ)))
            return UserError.exit_code
    return 0


def _find_mistake(error: BaseException) -> UserError | None:
    """Return the UserError that caused an error, which a pipeline wraps in its own."""
    cause = error.__cause__
    while cause is not None and not isinstance(cause, UserError):
        cause = cause.__cause__
    return cause


def main_and_exit(argv: Sequence[str]) -> None:
    """Train and end this process, also after an error.

    Nothing is joined or undone: the interpreter would wait for threads, and destroyed groups for
    operations in flight, possibly with a rank that hangs.
    """
    replace_closed_streams()
    gc.freeze()  # later collections skip the imported objects
    gc.enable()
    try:
        leave(main(argv, cleanup=ExitStack()))
    except (Exception, CheckpointException) as error:
        if is_communication_error(error):  # another rank failed; this traceback is in the log
            text = f"rank {os.environ.get('RANK', '0')}: {type(error).__name__}: {error}"
            _say(f"{text.splitlines()[0]} (traceback: this rank's log)")
        else:
            traceback.print_exc()
        leave(exit_code_of(error))
        raise  # unreachable


def _report(error: UserError) -> None:
    """Print an error once per job."""
    note_in_file(str(error))
    if isinstance(error, StoppedError | NonFiniteError) and os.environ.get("RANK", "0") != "0":
        return
    let_rank_0_report()
    _say(error)


def _say(message: object) -> None:
    with suppress(BrokenPipeError):  # e.g. `| head`: exit code and log file remain
        sys.stderr.write(f"{erase_line(sys.stderr)}{message}\n")
        sys.stderr.flush()


if __name__ == "__main__":
    main_and_exit(sys.argv[1:])
