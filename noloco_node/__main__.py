"""`python -m noloco_node`: the same as `noloco-node`."""

import sys

from noloco_node.cli import main

sys.exit(main())
