// Code that is compiled where glibc is 2.32 or newer reads this variable, which older ones lack. A
// copy of our own, which says that there may be other threads, lets the library run on both.
#if defined(__linux__) && !defined(__ANDROID__)
extern "C" {
extern char __libc_single_threaded __attribute__((visibility("hidden")));
char __libc_single_threaded = 0;
}
#endif
