"""`python -m torchtitan VERB ...` is the command `torchtitan VERB ...`."""

if __name__ == "__main__":
    from torchtitan.base.path import drop_current_folder

    drop_current_folder()

    from torchtitan.tools.command import run

    run()
