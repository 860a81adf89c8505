"""The command `python -m torchtitan VERB ...`, also installed as `torchtitan`."""

from torchtitan.tools.command import run

if __name__ == "__main__":
    run()
