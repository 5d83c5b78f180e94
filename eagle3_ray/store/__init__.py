"""The feature store: where bytes lie (filesystem), what a shard is (shards), and what counts as done (commits)."""
