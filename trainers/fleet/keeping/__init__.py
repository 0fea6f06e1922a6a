"""What a fleet keeps and shows: its journal, its results, the live table.

May import: fleet.deciding, folder_lock, record_file, plain_values.
"""
