"""The method itself: phases, the plateau, the learning rate. Pure: every file.

May import: errors.
"""
