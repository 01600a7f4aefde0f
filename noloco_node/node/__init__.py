"""The daemon: a replica of one stage, its life from entering the swarm to leaving it, its checkpoints; and the seed.

May import everything but the commands, and what starts or looks at nodes from outside.
"""
