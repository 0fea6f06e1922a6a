"""What a step needs and how long it takes on a card that is not here.

card (what a card file says), operator_class (what a kernel call does, its operations and bytes),
pricing (the seconds of a graph's tasks), card_measuring (makes the file of this machine).

May import: errors, graph, live, measuring, memory, program, torch_seams.
"""
