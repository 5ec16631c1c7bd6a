"""The supervisor: it runs a training until it is done. It imports no torch: it must survive what kills the training."""
