/* Loaded first (LD_PRELOAD): a socket that would listen on every address listens on the loopback address alone. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <string.h>

/* The proxy and the broker's replication listen on every address, and no setting says otherwise. */
int bind(int socket, const struct sockaddr *given, socklen_t length) {
    int (*next)(int, const struct sockaddr *, socklen_t) = dlsym(RTLD_NEXT, "bind");
    struct sockaddr_storage own;
    memcpy(&own, given, length < sizeof own ? length : sizeof own);
    if (given->sa_family == AF_INET) {
        struct sockaddr_in *one = (struct sockaddr_in *)&own;
        if (one->sin_addr.s_addr == htonl(INADDR_ANY)) one->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    } else if (given->sa_family == AF_INET6) {
        struct sockaddr_in6 *one = (struct sockaddr_in6 *)&own;
        if (!memcmp(&one->sin6_addr, &in6addr_any, sizeof in6addr_any))
            inet_pton(AF_INET6, "::ffff:127.0.0.1", &one->sin6_addr);
    }
    return next(socket, (struct sockaddr *)&own, length);
}
