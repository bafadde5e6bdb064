"""Ways to train one model on many ranks: thin glue over torch's DDP, FSDP2, tensor parallelism and pipelining."""
