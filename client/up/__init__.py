"""`swarm up`: all parts as processes of this machine."""
