"""The demo: the main job on real files, with real worker processes, one of which is killed meanwhile."""
