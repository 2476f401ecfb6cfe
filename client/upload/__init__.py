"""What a submission sends ahead: token shards and weights."""
