"""`python -m noloco_node`: the same as `noloco-node`."""

from noloco_node.cli.main import entry

if __name__ == "__main__":
    entry()
