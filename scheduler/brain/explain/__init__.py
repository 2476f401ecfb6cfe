"""Why a job or a peer is where it is, for people."""
