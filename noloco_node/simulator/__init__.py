"""A swarm in virtual time: the node's own code on a loop whose clock jumps, on modelled links and devices."""
