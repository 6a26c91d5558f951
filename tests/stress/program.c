// The driver as a program; hosts that live in another program's process load it as a library instead.
int stress_main(int argc, char ** argv);

int main(int argc, char ** argv) {
    return stress_main(argc, argv);
}
