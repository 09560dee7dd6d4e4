class Checkpoint:
    pass
