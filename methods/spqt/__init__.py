"""SpQt (arXiv 2511.04477): activation sparsity on 4-bit weights whose super-blocks run down one column."""
