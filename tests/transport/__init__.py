"""Both transports of states, from the bridge's shipper to the trainer's store."""
