"""Files that `rlvr env export` copies into what it writes; they run beside other projects."""
