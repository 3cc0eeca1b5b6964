"""python -m tx_export: the command line."""

from tx_export.cli import main

if __name__ == "__main__":
    main()
