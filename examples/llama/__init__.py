"""A Llama-family model compiled with TVM, small enough to read, running on TVM's paged KV cache."""
