"""One generation's group of members, and what they reduce and gather in it.

    form_group --> Group --> reduce_in_order   sums of one flat tensor, added in the order of ranks
                         --> all_gather_bytes  headers and votes
                         --> abandon           to the Graveyard, which ends it on its own thread

Every wait polls, and calls `alive()`, which raises when the generation has ended.

May import: elastic, torch_seams.
"""
