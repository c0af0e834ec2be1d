"""What a block has besides mixing: positions, norms, feeds and merges. One file a kind, one small contract each."""
