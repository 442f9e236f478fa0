"""A Ray cluster on this machine for a test: `python -m tests.system.ray_nodes STATE_FILE`.

The first node has no room for workers, the two others have a core for each. A line of the input is the id of a node
that is then lost. Everything ends with the input.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ray.cluster_utils import Cluster

# Cores of the nodes.
CORES = (0, 2, 2)


def main(state: Path) -> None:
    usual = {"node_ip_address": "127.0.0.1", "object_store_memory": 80 << 20}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={**usual, "num_cpus": CORES[0], "include_dashboard": False, "no_monitor": True},
    )
    for cores in CORES[1:]:
        cluster.add_node(num_cpus=cores, **usual)
    written = state.with_suffix(".new")
    written.write_text(str(cluster.address))
    written.rename(state)
    for line in sys.stdin:
        [lost] = [node for node in cluster.worker_nodes if node.node_id == line.strip()]
        cluster.remove_node(lost, allow_graceful=False)
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
