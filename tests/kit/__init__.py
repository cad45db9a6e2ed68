"""What several files of tests share: tiny models, servers, rows, processes."""
