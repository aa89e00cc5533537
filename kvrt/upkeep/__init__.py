"""What keeps a cache in order: K-shift, SelfExtend, defragmentation."""
