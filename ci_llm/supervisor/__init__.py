"""The supervisor: runs a training until it is done, whatever happens to it. No torch: it must survive what kills it."""
