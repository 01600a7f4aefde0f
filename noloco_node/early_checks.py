"""What a command looks at before anything that takes seconds to load is loaded, or anything is started."""

from __future__ import annotations

from noloco_node.collector import loading
from noloco_node.config.load import Config
from noloco_node.config.node_settings import NodeSettings
from noloco_node.storage.run_folder import RunFolder
from noloco_node.swarm.p2pd_arguments import check_port_free, listen_address
from noloco_node.swarm.peer_addresses import check_addresses, no_address


def check_peers(settings: NodeSettings, *, joins: bool = False) -> None:
    """Raise UserError: CONFIG where no initial peer is an address, or the host is none of this machine's;
    PEERS_UNREACHABLE where a node that `joins` has no initial peer and knows none from before."""
    check_addresses(settings.initial_peers)
    listen_address(settings.host, settings.port)
    check_port_free(settings.host, 0)  # of the port itself the node speaks, once it has its run folder
    if joins and not settings.initial_peers and not RunFolder(settings.run_folder).peers.exists():
        raise no_address()


def check_trainable(config: Config) -> None:
    """Raise UserError (CONFIG or DATA) where model and text do not fit each other, or the text is not there for a node
    that may read it. Loads transformers."""
    with loading():
        from noloco_node.preflight import check_text, plan_run

    plan_run(config.run)
    if config.node.stage in ("auto", 0):
        check_text(config.run)
