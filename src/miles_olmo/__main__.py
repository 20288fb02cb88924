from miles_olmo.cli import main

if __name__ == "__main__":
    main()
